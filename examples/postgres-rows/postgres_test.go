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

	"github.com/crashsafe/recovery/examples/internal/fleet"
	"github.com/jackc/pgx/v5"
)

// postgres is a server of these tests alone, on a socket in a temporary directory. They share it, because it takes seconds to make one.
type postgres struct {
	dir string
	cmd *exec.Cmd
}

// dsn is how to connect to a database.
func (p *postgres) dsn(database string) string {
	return fmt.Sprintf("host=%s user=postgres dbname=%s", p.dir, database)
}

var shared struct {
	once sync.Once
	postgres
	err error
}

// startPostgres starts the server for the first test that wants it.
func startPostgres(t *testing.T) *postgres {
	t.Helper()
	bin, err := findPostgres()
	fleet.Need(t, err)
	shared.once.Do(func() { shared.err = shared.start(bin) })
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return &shared.postgres
}

func stopPostgres() {
	if shared.cmd != nil {
		_ = shared.cmd.Process.Signal(syscall.SIGQUIT) // at once, with its children
		_ = shared.cmd.Wait()
	}
	if shared.dir != "" {
		_ = os.RemoveAll(shared.dir)
	}
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

func (p *postgres) start(bin string) error {
	var err error
	if p.dir, err = os.MkdirTemp("", "rows"); err != nil { // not t.TempDir: a socket's path is short, and its parents open to postgres
		return err
	}
	as, err := p.unprivileged()
	if err != nil {
		return err
	}
	data := filepath.Join(p.dir, "data")
	initdb := exec.Command(filepath.Join(bin, "initdb"), "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
	initdb.SysProcAttr, initdb.Dir = as, p.dir
	if out, err := initdb.CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w\n%s", err, out)
	}
	// No test crashes PostgreSQL itself, so nothing is lost without fsync.
	cmd := exec.Command(filepath.Join(bin, "postgres"), "-D", data, "-c", "listen_addresses=", "-c", "unix_socket_directories="+p.dir,
		"-c", "fsync=off", "-c", "max_connections=200", "-c", "log_min_messages=panic")
	cmd.SysProcAttr, cmd.Dir, cmd.Stderr = as, p.dir, os.Stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	p.cmd = cmd
	return p.answers()
}

// answers waits until a client can connect.
func (p *postgres) answers() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), fleet.Patience)
	defer cancel()
	for ctx.Err() == nil {
		var conn *pgx.Conn
		if conn, err = pgx.Connect(ctx, p.dsn("postgres")); err == nil {
			return conn.Close(ctx)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("postgres does not answer: %w", err)
}

// unprivileged is how to run PostgreSQL, which refuses to be root: as the user that its package made.
func (p *postgres) unprivileged() (*syscall.SysProcAttr, error) {
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
	return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}, os.Chown(p.dir, uid, gid)
}
