package main

import (
	"strings"

	"github.com/redis/go-redis/v9"
)

// setup is what the parent tells a worker, in the environment.
type setup struct {
	Name  string
	Redis string
	Run   string // names this run: two of them may share a server
}

// setupEnv holds a worker's setup. Where it is set, this program is a worker.
const setupEnv = "QUICKSTART_WORKER"

func (s setup) namespace() string { return "quickstart-" + s.Run }
func (s setup) prefix() string    { return "quickstart:" + s.Run + ":" }
func (s setup) queue() string     { return s.prefix() + "queue" }
func (s setup) taken() string     { return s.prefix() + "taken:" + s.Name }

// report is one line that a worker writes to its parent.
type report struct {
	What   what
	Job    string `json:",omitempty"`
	Worker string `json:",omitempty"` // the id of the worker that it is about
	Reason string `json:",omitempty"`
}

type what string

const (
	joined     what = "joined"      // as Worker
	suspected  what = "suspected"   // Worker is silent
	started    what = "started"     // Job is tracked and begins
	finished   what = "finished"    // Job's work is done
	lost       what = "lost"        // Job was given to another worker while we ran it
	handedBack what = "handed back" // Job, of the dead Worker, is in the queue again
)

// server accepts host:port, and redis:// URLs for servers that want a password.
func server(addr string) (*redis.Options, error) {
	if strings.Contains(addr, "://") {
		return redis.ParseURL(addr)
	}
	return &redis.Options{Addr: addr}, nil
}
