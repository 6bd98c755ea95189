package recovery

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
)

// gcLock is the fleet's sweep lock. Whoever holds it sweeps; after a pass it is kept, resting, until its TTL ends, and so there is
// one pass per interval however many workers there are. It saves work and nothing else: two sweepers at once are
// harmless, because every claim is decided by a script in the dead worker's slot.
type gcLock struct {
	rdb   redis.UniversalClient
	key   string
	token string
	ttl   time.Duration
}

// hold is an answer about the lock: whether it is ours, and for how long it goes on.
type hold struct {
	ours bool
	left time.Duration
}

// acquire takes the lock, or extends it if it is ours. barge takes it also from a holder that only rests.
func (l *gcLock) acquire(ctx context.Context, barge bool) (hold, error) {
	flag := 0
	if barge {
		flag = 1
	}
	answer, err := ints(ctx, l.rdb, lockScript, []string{l.key}, l.token, ms(l.ttl), flag)
	if err == nil && len(answer) != 2 {
		err = fmt.Errorf("script answered %d values, not 2", len(answer))
	}
	if err != nil {
		return hold{}, fmt.Errorf("take the sweep lock: %w", err)
	}
	return hold{ours: answer[0] == 1, left: time.Duration(max(0, answer[1])) * time.Millisecond}, nil
}

// rest keeps the lock until its TTL ends, but lets a sweep on demand take it.
func (l *gcLock) rest(ctx context.Context) error { return l.unlock(ctx, "rest") }

// release gives the lock up, if it is ours.
func (l *gcLock) release(ctx context.Context) error { return l.unlock(ctx, "release") }

func (l *gcLock) unlock(ctx context.Context, how string) error {
	if err := unlockScript.Run(ctx, l.rdb, []string{l.key}, l.token, how).Err(); err != nil {
		return fmt.Errorf("%s the sweep lock: %w", how, err)
	}
	return nil
}
