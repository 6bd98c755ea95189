package recovery

import (
	"context"

	"github.com/redis/go-redis/v9"
)

// afterUntake calls a func right after untake was executed.
type afterUntake struct {
	m     *member
	after func()
}

func (h afterUntake) DialHook(next redis.DialHook) redis.DialHook { return next }
func (h afterUntake) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if nameOf(cmd) == "untake" && err == nil {
			h.after()
		}
		return err
	}
}
func (h afterUntake) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
