package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

// patience is how long nothing may happen before the show is broken off. The slowest thing that may happen is a recovery, 1.2s.
const patience = 10 * time.Second

// show is one run. Everything in it belongs to the goroutine of run.
type show struct {
	options
	setup
	rdb    *redis.Client
	fleet  *fleet
	ledger *ledger
	screen *screen
	ids    map[string]*proc // by the library's worker id
	kills  int
	begun  int // jobs begun, repetitions too
}

func run(ctx context.Context, o options) error {
	s := &show{
		options: o,
		setup:   setup{Redis: o.redis, Run: strings.ToLower(rand.Text()[:10])},
		fleet:   &fleet{events: make(chan event, 100)},
		ledger:  newLedger(o.jobs),
		ids:     make(map[string]*proc),
	}
	where := "at " + o.redis
	if o.redis == "" {
		m, err := miniredis.Run()
		if err != nil {
			return fmt.Errorf("start the embedded Redis: %w", err)
		}
		defer m.Close()
		m.ClockTTL(true) // a test server: keys would never expire by themselves
		s.Redis, where = m.Addr(), "embedded, at "+m.Addr()
	}
	var err error
	if s.rdb, err = connect(s.Redis); err != nil {
		return fmt.Errorf("-redis: %w", err)
	}
	defer s.rdb.Close()
	s.screen = newScreen(o.workers + 1)
	if err := s.fill(ctx); err != nil {
		return fmt.Errorf("Redis %s: %w", where, err)
	}
	s.screen.say(plain, "redis", "%s; %d jobs in the queue", where, o.jobs)
	err = s.play(ctx)
	return errors.Join(err, s.finale(ctx, err))
}
