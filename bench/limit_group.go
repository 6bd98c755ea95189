package main

import (
	"bufio"
	"net"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
)

// The limit of many callers. The least group commit: callers queue, one of them writes for all who wait, without any client library and with
// nothing that a production library needs. No call can be given up, times out or is repeated; nobody counts, nothing is known of a lease but its
// number; an error ends it all. What is kept is what Redis has to do: the session is checked, late copies are told, the clock is read. So this is
// what two cores that client and Redis share leave room for; the distance to it is what the library costs.

const limitTrackMany = `
local s = redis.call("HMGET", KEYS[1], "state", ARGV[1], "start")
if s[1] ~= "live" or tonumber(ARGV[2]) <= tonumber(s[2] or 0) then return 0 end
local t = redis.call("TIME")
local start = string.format("%.0f", math.max(t[1] * 1000000 + t[2], tonumber(s[3] or 0) + 1))
redis.call("HSET", KEYS[1], ARGV[1], ARGV[2], "start", start)
local members = {}
for i = 3, #ARGV do
  members[#members + 1] = start
  members[#members + 1] = ARGV[i]
end
redis.call("ZADD", KEYS[2], unpack(members))
return start`

const limitDoneMany = `
local n = redis.call("ZREM", KEYS[1], unpack(ARGV))
redis.call("HDEL", KEYS[2], unpack(ARGV))
return n`

// limitCall is one caller's track or done.
type limitCall struct {
	id   string
	done bool
	over chan error
}

// limitGroup is one connection, and who waits for it.
type limitGroup struct {
	c           *rawConn
	track, done string // the scripts' names
	payload     string
	number      int
	out         []byte

	mu    sync.Mutex // guards what follows
	queue []*limitCall
	busy  bool
}

const limitKeys = "recovery:1:default:{host:12345-abcdefghijklmnop}:"

// leastGroup is the limit as a subject.
func leastGroup(beside int) subject {
	return subject{"the least", func(e env) (func(int) error, func() error, error) {
		nc, err := net.Dial("tcp", e.addr)
		if err != nil {
			return nil, nil, err
		}
		g := &limitGroup{c: &rawConn{nc, bufio.NewReaderSize(nc, 64<<10)}, payload: string(e.payload)}
		if g.track, err = g.c.call(1, wire("SCRIPT", "LOAD", limitTrackMany)); err == nil {
			g.done, err = g.c.call(1, wire("SCRIPT", "LOAD", limitDoneMany))
		}
		if err == nil {
			_, err = g.c.call(1, wire("HSET", limitKeys+"session", "state", "live"))
		}
		for n := 0; n < beside && err == nil; n++ {
			id := "beside-" + strconv.Itoa(n)
			_, err = g.c.call(2, wire("ZADD", limitKeys+"inflight", "1", id), wire("HSET", limitKeys+"jobs", id, g.payload))
		}
		if err != nil {
			nc.Close()
			return nil, nil, err
		}
		var next atomic.Int64
		job := func(int) error {
			id := strconv.FormatInt(next.Add(1), 10)
			if err := g.do(&limitCall{id: id, over: make(chan error, 1)}); err != nil {
				return err
			}
			return g.do(&limitCall{id: id, done: true, over: make(chan error, 1)})
		}
		return job, nc.Close, nil
	}}
}

// do waits until the call was written, by whoever comes to it first.
func (g *limitGroup) do(c *limitCall) error {
	g.mu.Lock()
	g.queue = append(g.queue, c)
	if g.busy {
		g.mu.Unlock()
		return <-c.over
	}
	g.busy = true
	g.mu.Unlock()
	for first := true; ; first = false {
		if !first {
			runtime.Gosched() // those who were just answered come again
		}
		g.mu.Lock()
		batch := g.queue
		g.queue = nil
		g.busy = len(batch) > 0
		g.mu.Unlock()
		if len(batch) == 0 {
			return <-c.over
		}
		err := g.write(batch)
		for _, c := range batch {
			c.over <- err
		}
	}
}

func (g *limitGroup) write(batch []*limitCall) error {
	var tracks, dones int
	for _, c := range batch {
		if c.done {
			dones++
		} else {
			tracks++
		}
	}
	g.out = g.out[:0]
	replies := 0
	if tracks > 0 {
		g.number++
		g.head(1, "MULTI")
		g.head(2+2*tracks, "HSET", limitKeys+"jobs")
		for _, c := range batch {
			if !c.done {
				g.head(0, c.id, g.payload)
			}
		}
		g.head(7+tracks, "EVALSHA", g.track, "2", limitKeys+"session", limitKeys+"inflight", "lane0", strconv.Itoa(g.number))
		g.members(batch, false)
		g.head(1, "EXEC")
		replies += 4
	}
	if dones > 0 {
		g.head(5+dones, "EVALSHA", g.done, "2", limitKeys+"inflight", limitKeys+"jobs")
		g.members(batch, true)
		replies++
	}
	_, err := g.c.call(replies, g.out)
	return err
}

// head begins a command of n words with these, or goes on with it.
func (g *limitGroup) head(n int, words ...string) {
	if n > 0 {
		g.out = append(strconv.AppendInt(append(g.out, '*'), int64(n), 10), "\r\n"...)
	}
	for _, w := range words {
		g.out = append(strconv.AppendInt(append(g.out, '$'), int64(len(w)), 10), "\r\n"...)
		g.out = append(append(g.out, w...), "\r\n"...)
	}
}

func (g *limitGroup) members(batch []*limitCall, done bool) {
	for _, c := range batch {
		if c.done == done {
			g.head(0, c.id)
		}
	}
}
