package main

import (
	"bufio"
	"fmt"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
)

// The limit of working off a list: pages of elements are popped and recorded by one script that checks the session, the number of the call and the
// clock; handlers share them; what they have finished leaves with the next page, in the same write. Nothing can be lost by a crash here, but
// nothing else is cared for: no call can fail, no job has a name, a context or an end of its own, nobody waits for an empty list.

const limitFetch = `
local s = redis.call("HMGET", KEYS[1], "state", "fetch", "start")
if s[1] ~= "live" or tonumber(ARGV[1]) <= tonumber(s[2] or 0) then return {} end
local elements = redis.call("RPOP", KEYS[4], ARGV[3])
if not elements then return {} end
local t = redis.call("TIME")
local start = string.format("%.0f", math.max(t[1] * 1000000 + t[2], tonumber(s[3] or 0) + 1))
local records, index = {}, {}
for i, element in ipairs(elements) do
  local member = ARGV[2] + i .. ""
  records[2 * i - 1], records[2 * i] = member, element
  index[2 * i - 1], index[2 * i] = start, member
end
redis.call("HSET", KEYS[3], unpack(records))
redis.call("ZADD", KEYS[2], unpack(index))
redis.call("HSET", KEYS[1], "fetch", ARGV[1], "start", start)
return elements`

// drainLeast is the limit as a drainer.
func drainLeast(e env, concurrency int, handled func()) (func(), error) {
	nc, err := net.Dial("tcp", e.addr)
	if err != nil {
		return nil, err
	}
	g := &limitGroup{c: &rawConn{nc, bufio.NewReaderSize(nc, 256<<10)}}
	if g.track, err = g.c.call(1, wire("SCRIPT", "LOAD", limitFetch)); err == nil {
		g.done, err = g.c.call(1, wire("SCRIPT", "LOAD", limitDoneMany))
	}
	if err == nil {
		_, err = g.c.call(1, wire("HSET", limitKeys+"session", "state", "live"))
	}
	if err != nil {
		nc.Close()
		return nil, err
	}
	const page = 200
	jobs := make(chan *limitCall, 2*page)
	var mu sync.Mutex
	var done []*limitCall
	var left atomic.Int64
	freed := make(chan struct{}, 1)
	for range concurrency {
		go func() {
			for c := range jobs {
				handled()
				mu.Lock()
				done = append(done, c)
				mu.Unlock()
				if left.Add(-1) == page/2 {
					freed <- struct{}{}
				}
			}
		}()
	}
	stopped := make(chan error, 1)
	go func() {
		defer close(jobs)
		stopped <- func() error {
			for base := 0; ; base += page {
				mu.Lock()
				ended := done
				done = nil
				mu.Unlock()
				elements, err := g.fetch(base, page, ended)
				if err != nil || len(elements) == 0 {
					return err
				}
				full := left.Add(int64(len(elements))) > page/2
				for i := range elements {
					jobs <- &limitCall{id: strconv.Itoa(base + i + 1), done: true}
				}
				if full {
					<-freed
				}
			}
		}()
	}()
	return func() {
		if err := <-stopped; err != nil {
			fmt.Println("the least:", err)
		}
		nc.Close()
	}, nil
}

// fetch ends what is done, and takes a page, in one write.
func (g *limitGroup) fetch(base, page int, done []*limitCall) ([]string, error) {
	g.out = g.out[:0]
	if len(done) > 0 {
		g.head(5+len(done), "EVALSHA", g.done, "2", limitKeys+"inflight", limitKeys+"jobs")
		g.members(done, true)
	}
	g.number++
	g.head(10, "EVALSHA", g.track, "4", limitKeys+"session", limitKeys+"inflight", limitKeys+"jobs", "jobs",
		strconv.Itoa(g.number), strconv.Itoa(base), strconv.Itoa(page))
	if _, err := g.c.Write(g.out); err != nil {
		return nil, err
	}
	if len(done) > 0 {
		if _, err := g.c.reply(); err != nil {
			return nil, err
		}
	}
	return g.c.list()
}
