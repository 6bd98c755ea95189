package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"
)

// The limit of a lone caller. Without any client library, over one connection, prepared bytes: what plain ZADD, HSET, ZREM and HDEL take, and
// what the least that the protocol needs takes. The difference is Redis' own: a script that checks that the session lives, that this is no
// late copy, and reads the clock, is some microseconds more than plain commands, and no client can take that back.

// rawConn speaks just enough of the protocol.
type rawConn struct {
	net.Conn
	r *bufio.Reader
}

func wire(args ...string) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "*%d\r\n", len(args))
	for _, a := range args {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(a), a)
	}
	return b.Bytes()
}

// call writes prepared bytes and reads so many replies.
func (c *rawConn) call(replies int, b ...[]byte) (last string, err error) {
	if _, err = c.Write(bytes.Join(b, nil)); err != nil {
		return "", err
	}
	for range replies {
		if last, err = c.reply(); err != nil {
			return "", err
		}
	}
	return last, nil
}

func (c *rawConn) reply() (string, error) {
	line, err := c.r.ReadString('\n')
	if err != nil {
		return "", err
	}
	text := strings.TrimRight(line[1:], "\r\n")
	switch line[0] {
	case '-':
		return "", fmt.Errorf("redis: %s", text)
	case '$':
		n, err := strconv.Atoi(text)
		if err != nil || n < 0 {
			return "", err
		}
		b := make([]byte, n+2)
		_, err = io.ReadFull(c.r, b)
		return string(b[:n]), err
	case '*':
		n, err := strconv.Atoi(text)
		for range n {
			if text, err = c.reply(); err != nil {
				return "", err
			}
		}
		return text, err
	}
	return text, nil
}

// list reads an answer of strings.
func (c *rawConn) list() ([]string, error) {
	line, err := c.r.ReadString('\n')
	if err != nil {
		return nil, err
	}
	n, err := strconv.Atoi(strings.TrimRight(line[1:], "\r\n"))
	if line[0] != '*' || err != nil {
		return nil, fmt.Errorf("redis: %q", line)
	}
	all := make([]string, 0, n)
	for range n {
		text, err := c.reply()
		if err != nil {
			return nil, err
		}
		all = append(all, text)
	}
	return all, nil
}

const limitTrack = `
local s = redis.call("HMGET", KEYS[1], "state", ARGV[1], "start")
if s[1] ~= "live" or tonumber(ARGV[2]) <= tonumber(s[2] or 0) then return 0 end
local t = redis.call("TIME")
local start = string.format("%.0f", math.max(t[1] * 1000000 + t[2], tonumber(s[3] or 0) + 1))
redis.call("HSET", KEYS[1], ARGV[1], ARGV[2], "start", start)
redis.call("ZADD", KEYS[2], start, ARGV[3])
return start`

const limitDone = `
if redis.call("ZREM", KEYS[1], ARGV[1]) == 1 then return redis.call("HDEL", KEYS[2], ARGV[1]) end
return 0`

// limits answers the time of one job by plain commands and by the least protocol, medians of interleaved repeats.
func (e env) limits(repeats, jobs int) (plain, protocol time.Duration, err error) {
	if err := e.srv.admin.FlushAll(bg).Err(); err != nil {
		return 0, 0, err
	}
	nc, err := net.Dial("tcp", e.srv.addr)
	if err != nil {
		return 0, 0, err
	}
	defer nc.Close()
	c := &rawConn{nc, bufio.NewReader(nc)}
	track, err := c.call(1, wire("SCRIPT", "LOAD", limitTrack))
	if err != nil {
		return 0, 0, err
	}
	done, err := c.call(1, wire("SCRIPT", "LOAD", limitDone))
	if err != nil {
		return 0, 0, err
	}
	const w = "recovery:1:default:{host:12345-abcdefghijklmnop}:"
	if _, err = c.call(1, wire("HSET", w+"session", "state", "live")); err != nil {
		return 0, 0, err
	}
	n := 0
	payload := string(e.payload)
	run := func(f func(id string) error) (time.Duration, error) {
		began := time.Now()
		for range jobs {
			n++
			if err := f(strconv.Itoa(n)); err != nil {
				return 0, err
			}
		}
		return time.Since(began) / time.Duration(jobs), nil
	}
	var plains, protocols []time.Duration
	for range repeats {
		p, err := run(func(id string) error {
			if _, err := c.call(2, wire("ZADD", "index", "1763000000000", id), wire("HSET", "jobs", id, payload)); err != nil {
				return err
			}
			_, err := c.call(2, wire("ZREM", "index", id), wire("HDEL", "jobs", id))
			return err
		})
		if err != nil {
			return 0, 0, err
		}
		q, err := run(func(id string) error {
			if _, err := c.call(4, wire("MULTI"), wire("HSET", w+"jobs", id, payload),
				wire("EVALSHA", track, "2", w+"session", w+"inflight", "lane0", id, id), wire("EXEC")); err != nil {
				return err
			}
			_, err := c.call(1, wire("EVALSHA", done, "2", w+"inflight", w+"jobs", id))
			return err
		})
		if err != nil {
			return 0, 0, err
		}
		plains, protocols = append(plains, p), append(protocols, q)
	}
	same := func(d time.Duration) time.Duration { return d }
	return median(plains, same), median(protocols, same), nil
}
