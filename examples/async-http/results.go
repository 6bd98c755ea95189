package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"
)

// results is what this program's Callback writes to. It might be a table of your database: a row for each request, with the fence of the run that wrote it.
//
//	<prefix>results   hash: request -> result
//	<prefix>fences    hash: request -> fence of that result
//	<prefix>calls     list: every call of the Callback that came here, refused or not
type results struct {
	rdb    redis.UniversalClient
	prefix string
	worker string
}

// result is a row.
type result struct {
	ID     string
	Status int
	Body   []byte
	Err    string `json:",omitempty"`
	Fence  int64
	Worker string
}

var errStale = errors.New("a later run has written its result")

//go:embed keep.lua
var keepText string

var keepScript = redis.NewScript(keepText)

// keep is the Callback. A result of a run that is older than the one in the row is refused, and that is no error: the request is answered.
func (r *results) keep(ctx context.Context, a Answer) error {
	if err := r.write(ctx, a); !errors.Is(err, errStale) {
		return err
	}
	return nil
}

func (r *results) write(ctx context.Context, a Answer) error {
	row := result{ID: a.Request.ID, Status: a.Status, Body: a.Body, Fence: a.Fence, Worker: r.worker}
	if a.Err != nil {
		row.Err = a.Err.Error()
	}
	text, err := json.Marshal(row)
	if err != nil {
		return err
	}
	keys := []string{r.rows(), r.fences(), r.calls()}
	kept, err := keepScript.Run(ctx, r.rdb, keys, a.Request.ID, a.Fence, text).Int()
	if err == nil && kept == 0 {
		err = errStale
	}
	if err != nil {
		return fmt.Errorf("keep result of %q with fence %d: %w", a.Request.ID, a.Fence, err)
	}
	return nil
}

func (r *results) rows() string   { return r.prefix + "results" }
func (r *results) fences() string { return r.prefix + "fences" }
func (r *results) calls() string  { return r.prefix + "calls" }
