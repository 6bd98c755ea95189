package recovery

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
)

//go:embed lua/*.lua
var luaFiles embed.FS

// Each file's header says what it does, why it must be one step, and why running it twice is safe.
var (
	joinScript     = loadScript("join")
	beatScript     = loadScript("beat")
	trackScript    = loadScript("track")
	doneScript     = loadScript("done")
	whereScript    = loadScript("where")
	claimScript    = loadScript("claim")
	takeScript     = loadScript("take")
	postponeScript = loadScript("postpone")
	forgetScript   = loadScript("forget")
	leaveScript    = loadScript("leave")
	lockScript     = loadScript("lock")
	unlockScript   = loadScript("unlock")
	buryScript     = loadScript("bury")
	countScript    = loadScript("count")
	untakeScript   = loadScript("untake")
	exhumeScript   = loadScript("exhume")
	fetchScript    = loadScript("fetch")
	deliverScript  = loadScript("deliver")
	restoreScript  = loadScript("restore")

	checkpointScript = loadScript("checkpoint")
)

func loadScript(stem string) *redis.Script { return redis.NewScript(luaSource(stem)) }

func luaSource(stem string) string {
	src, err := luaFiles.ReadFile("lua/" + stem + ".lua")
	if err != nil {
		panic(err) // embedded: it can't be missing in a program that compiled
	}
	return string(src)
}

// Session states as scripts answer them.
const (
	sessionAbsent = -1
	sessionFenced = 0
	sessionLive   = 1
)

// Places of a lease, as where.lua answers them.
const (
	placeUnknown  = 0
	placeTracked  = 1
	placeClaimed  = 2
	placeHanded   = 3
	placeNoRecord = 4
	placeNoIndex  = 5 // damage; a sweep that finds it hands it back

	// placeQueued is not an answer, but what follows from one: the Fetch that took the lease is not in Redis. A failover undid it, and the job
	// is in its list again.
	placeQueued = 6
)

func isNoScript(err error) bool {
	return errors.Is(err, redis.ErrNoScript) || redis.HasErrorPrefix(err, "NOSCRIPT")
}

// isWrongType reports that a key of ours holds what only a stranger can have put there. Some servers put a script's own words
// before the error's name.
func isWrongType(err error) bool {
	var answer redis.Error
	return errors.As(err, &answer) && strings.Contains(answer.Error(), "WRONGTYPE ")
}

// isAnswer reports that err is what the server said, and not that it may have said something else.
func isAnswer(err error) bool {
	var answer redis.Error
	return errors.As(err, &answer)
}

// isOOM reports that Redis refused a write because its memory is full.
func isOOM(err error) bool {
	var answer redis.Error
	return errors.As(err, &answer) && strings.Contains(answer.Error(), "OOM ")
}

// ints runs a script that answers integers.
func ints(ctx context.Context, rdb redis.Scripter, s *redis.Script, keys []string, args ...any) ([]int64, error) {
	return s.Run(ctx, rdb, keys, args...).Int64Slice()
}

// replies reads the values of a script's answer one after the other. Every value is checked: what answers may be a proxy
// or a server that only resembles Redis.
type replies struct {
	values []any
	err    error
}

func readReplies(cmd *redis.Cmd) *replies {
	values, err := cmd.Slice()
	return &replies{values: values, err: err}
}

func (r *replies) more() bool { return r.err == nil && len(r.values) > 0 }

func (r *replies) next() any {
	if r.err == nil && len(r.values) == 0 {
		r.err = errors.New("script's answer is too short")
	}
	if r.err != nil {
		return nil
	}
	v := r.values[0]
	r.values = r.values[1:]
	if err, ok := v.(error); ok && !errors.Is(err, redis.Nil) {
		r.err = err
	}
	return v
}

func (r *replies) int() int64 {
	v := r.next()
	switch v := v.(type) {
	case int64:
		return v
	case string:
		if n, err := strconv.ParseInt(v, 10, 64); err == nil {
			return n
		}
	}
	if r.err == nil {
		r.err = fmt.Errorf("script answered %T where a number was expected", v)
	}
	return 0
}

// bytes is nil where the script answered false.
func (r *replies) bytes() []byte {
	v := r.next()
	if s, ok := v.(string); ok {
		return []byte(s)
	}
	if v != nil && r.err == nil {
		r.err = fmt.Errorf("script answered %T where a string was expected", v)
	}
	return nil
}

func (r *replies) string() string { return string(r.bytes()) }
