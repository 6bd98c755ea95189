package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
)

// servers are a PostgreSQL and a Redis of these tests alone, on sockets in a temporary directory.
type servers struct {
	dir   string
	redis string // socket
	procs []*exec.Cmd
}

func (s *servers) postgres(database string) string {
	return fmt.Sprintf("host=%s user=postgres dbname=%s", s.dir, database)
}

var shared struct {
	once sync.Once
	servers
	err error
}

// startServers starts both servers for the first test that wants them.
func startServers(t *testing.T) *servers {
	t.Helper()
	bin, err := findPostgres()
	if _, redisErr := exec.LookPath("redis-server"); err == nil {
		err = redisErr
	}
	switch {
	case err != nil && os.Getenv("CI") != "":
		t.Fatal(err)
	case err != nil:
		t.Skip(err)
	}
	shared.once.Do(func() { shared.err = shared.start(bin) })
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return &shared.servers
}

// findPostgres answers the directory of PostgreSQL's programs. Debian keeps them out of PATH.
func findPostgres() (string, error) {
	if path, err := exec.LookPath("initdb"); err == nil {
		return filepath.Dir(path), nil
	}
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	if len(found) == 0 {
		return "", errors.New("PostgreSQL is missing: no initdb in PATH or /usr/lib/postgresql/*/bin (apt-get install postgresql)")
	}
	return filepath.Dir(found[len(found)-1]), nil
}

func (s *servers) start(bin string) error {
	var err error
	if s.dir, err = os.MkdirTemp("", "rows"); err != nil { // not t.TempDir: a socket's path is short, and its parents open to postgres
		return err
	}
	as, err := s.unprivileged()
	if err != nil {
		return err
	}
	data := filepath.Join(s.dir, "data")
	initdb := exec.Command(filepath.Join(bin, "initdb"), "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
	initdb.SysProcAttr, initdb.Dir = as, s.dir
	if out, err := initdb.CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w\n%s", err, out)
	}
	// No test crashes PostgreSQL itself, so nothing is lost without fsync.
	err = s.run(as, filepath.Join(bin, "postgres"), "-D", data, "-c", "listen_addresses=", "-c", "unix_socket_directories="+s.dir,
		"-c", "fsync=off", "-c", "max_connections=200", "-c", "log_min_messages=panic")
	if err != nil {
		return err
	}
	s.redis = filepath.Join(s.dir, "redis.sock")
	if err := s.run(nil, "redis-server", "--port", "0", "--unixsocket", s.redis, "--dir", s.dir, "--save", "", "--loglevel", "warning"); err != nil {
		return err
	}
	rdb := redis.NewClient(&redis.Options{Addr: s.redis})
	defer rdb.Close()
	return errors.Join(answers("redis-server", func(ctx context.Context) error { return rdb.Ping(ctx).Err() }),
		answers("postgres", func(ctx context.Context) error {
			conn, err := pgx.Connect(ctx, s.postgres("postgres"))
			if err == nil {
				err = conn.Close(ctx)
			}
			return err
		}))
}

// unprivileged is how to run PostgreSQL, which refuses to be root: as the user that its package made.
func (s *servers) unprivileged() (*syscall.SysProcAttr, error) {
	if os.Getuid() != 0 {
		return nil, nil
	}
	account, err := user.Lookup("postgres")
	if err != nil {
		return nil, err
	}
	uid, err := strconv.Atoi(account.Uid)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.Atoi(account.Gid)
	if err != nil {
		return nil, err
	}
	return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}, os.Chown(s.dir, uid, gid)
}

func (s *servers) run(as *syscall.SysProcAttr, name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.SysProcAttr, cmd.Dir, cmd.Stderr = as, s.dir, os.Stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	s.procs = append(s.procs, cmd)
	return nil
}

func answers(name string, ask func(context.Context) error) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for ctx.Err() == nil {
		if err = ask(ctx); err == nil {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("%s does not answer: %w", name, err)
}

func stopServers() {
	for _, cmd := range shared.procs {
		_ = cmd.Process.Signal(syscall.SIGQUIT) // PostgreSQL: at once, with its children. Redis dies of it, too
		_ = cmd.Wait()
	}
	if shared.dir != "" {
		_ = os.RemoveAll(shared.dir)
	}
}
