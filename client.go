package recovery

import (
	"errors"
	"reflect"
	"time"

	"github.com/redis/go-redis/v9"
)

// validateClient refuses clients on which the protocol can't hold.
func validateClient(rdb redis.UniversalClient) error {
	if isNil(rdb) {
		return errors.New("rdb is nil: a connected redis client is needed")
	}
	if _, ok := rdb.(*redis.Ring); ok {
		return errors.New("rdb is a *redis.Ring: when a shard is away a Ring writes to another one, so that fences and leases " +
			"disappear and come back with the shard, and jobs would run twice unnoticed; use a single node, Sentinel or Cluster")
	}
	return nil
}

// hasTimeouts reports that no call of the client can hang for ever.
func hasTimeouts(rdb redis.UniversalClient) bool {
	switch c := rdb.(type) {
	case *redis.Client:
		o := c.Options()
		return o.ReadTimeout > 0 && o.WriteTimeout > 0 && max(o.ReadTimeout, o.WriteTimeout) <= time.Minute
	case *redis.ClusterClient:
		o := c.Options()
		return o.ReadTimeout > 0 && o.WriteTimeout > 0 && max(o.ReadTimeout, o.WriteTimeout) <= time.Minute
	}
	return false
}

// isNil also sees a typed nil inside of an interface.
func isNil(v any) bool {
	if v == nil {
		return true
	}
	rv := reflect.ValueOf(v)
	switch rv.Kind() {
	case reflect.Pointer, reflect.Func, reflect.Map, reflect.Slice, reflect.Interface, reflect.Chan:
		return rv.IsNil()
	}
	return false
}

// mostLists is for how many lists a process can wait at a time: one connection each.
const mostLists = 4096

// dedicated is a client with the same settings and connections of its own. own is false for a client of unknown make: then what can't be ended
// is left to end by itself.
func dedicated(rdb redis.UniversalClient) (client redis.UniversalClient, own bool) {
	switch c := rdb.(type) {
	case *redis.Client:
		o := *c.Options()
		o.MaxRetries, o.MinIdleConns, o.PoolSize, o.MaxActiveConns = -1, 0, mostLists, 0
		return redis.NewClient(&o), true
	case *redis.ClusterClient:
		o := *c.Options()
		o.MinIdleConns, o.PoolSize, o.MaxActiveConns = 0, mostLists, 0
		return redis.NewClusterClient(&o), true
	}
	return rdb, false
}
