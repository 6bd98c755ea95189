package main

import (
	"bytes"
	"errors"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// build compiles the program as a user's go run does.
func build(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "quickstart")
	if runtime.GOOS == "windows" {
		bin += ".exe"
	}
	out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return bin
}

// start runs the program to its end.
func start(t *testing.T, bin string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(t.Context(), bin, args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		require.NoError(t, err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

func TestQuickstart(t *testing.T) {
	t.Parallel()
	bin := build(t)
	for name, test := range map[string]struct {
		args []string
		want []string
	}{
		"one of three is killed": {
			[]string{"-jobs", "12"},
			[]string{"kill -9", "is dead (", " recovered job-", " again\n", "\njobs in 12, done 12, recovered ", ", lost 0"},
		},
		"nobody is killed": {
			[]string{"-jobs", "4", "-kill", "0"},
			[]string{"\njobs in 4, done 4, recovered 0, lost 0"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			code, stdout, stderr := start(t, bin, test.args...)
			assert.Zero(t, code, "%s%s", stdout, stderr)
			for _, want := range test.want {
				assert.Contains(t, stdout, want)
			}
			assert.Empty(t, stderr)
			assert.NotContains(t, stdout, "\x1b", "escape sequences, though stdout is no terminal")
		})
	}
	for flag, args := range map[string][]string{
		"-kill is 3":            {"-kill", "3"},
		"-kill is -1":           {"-kill", "-1"},
		"-workers is 0":         {"-workers", "0"},
		"-jobs is 0":            {"-jobs", "0"},
		`"many" for flag -jobs`: {"-jobs", "many"},
		"-redis is":             {"-redis", "http://127.0.0.1"},
		"unexpected arguments":  {"help"},
	} {
		t.Run(flag, func(t *testing.T) {
			t.Parallel()
			code, stdout, stderr := start(t, bin, args...)
			assert.Equal(t, exitUsage, code)
			assert.Empty(t, stdout)
			assert.Contains(t, stderr, flag)
		})
	}
}

func TestLedger_close(t *testing.T) {
	t.Parallel()
	l := newLedger(4)
	l.finishes["job-001"], l.finishes["job-002"] = 1, 2
	l.recovered["job-002"] = true
	assert.False(t, l.complete())
	got := l.close([]string{"job-002", "job-003"})
	assert.Equal(t, tally{in: 4, done: 2, recovered: 1, again: 1, queued: 1, lost: []string{"job-004"}}, got)
	assert.Equal(t, "jobs in 4, done 2, recovered 1, lost 1, left in the queue 1 (done twice 1)", got.String())

	s := &show{screen: &screen{out: &bytes.Buffer{}}}
	assert.ErrorContains(t, s.judge(got, nil), "lost: job-004")
	assert.NoError(t, s.judge(tally{in: 1, done: 1}, nil))
}
