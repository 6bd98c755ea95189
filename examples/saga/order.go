package main

import "context"

// Order is what the saga is about.
type Order struct {
	ID       string
	Item     string // reserve takes one from stock
	Customer string // charge takes Price from the balance
	Price    int
	Route    string // ship takes one place
}

// orderSteps are the three steps of an order.
func orderSteps(s *store) []Step {
	step := func(name string, what func(Order) (account string, amount int)) Step {
		act := func(verb string) func(context.Context, Run, Order) error {
			return func(ctx context.Context, run Run, o Order) error {
				account, amount := what(o)
				return s.act(ctx, verb, run, name, account, amount)
			}
		}
		return Step{Name: name, Apply: act(applyVerb), Undo: act(undoVerb)}
	}
	return []Step{
		step("reserve", func(o Order) (string, int) { return "stock:" + o.Item, 1 }),
		step("charge", func(o Order) (string, int) { return "balance:" + o.Customer, o.Price }),
		step("ship", func(o Order) (string, int) { return "places:" + o.Route, 1 }),
	}
}
