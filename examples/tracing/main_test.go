package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const mainEnv = "TRACING_TEST_MAIN" // makes the test binary the program

func TestMain(m *testing.M) {
	if os.Getenv(mainEnv) != "" {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

var spanLine = regexp.MustCompile(`(?m)^span "(.+)" trace=([0-9a-f]{32}) id=([0-9a-f]{16})(?: recovery=(\d+))?(?: link=([0-9a-f]{32})/([0-9a-f]{16}))?$`)

func TestTracing(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), mainEnv+"=1")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(t, err, "%s%s", out, &stderr)
	assert.Empty(t, stderr.String())
	assert.Contains(t, string(out), "\nworker: signal: killed\n")

	spans := spanLine.FindAllStringSubmatch(string(out), -1)
	require.Len(t, spans, 3, "%s", out)
	const name, traceID, spanID, recovery, linkTrace, linkSpan = 1, 2, 3, 4, 5, 6
	lost, again, send := spans[0], spans[1], spans[2]
	assert.Equal(t, []string{"take mail-1", "take mail-1", "send mail-1"}, []string{lost[name], again[name], send[name]})
	assert.Equal(t, []string{"0", "1"}, []string{lost[recovery], again[recovery]})
	assert.Empty(t, lost[linkTrace], "the first run has nothing to link to")
	assert.Equal(t, lost[traceID], again[linkTrace], "the second run links to the first one's trace")
	assert.Equal(t, lost[spanID], again[linkSpan])
	assert.NotEqual(t, lost[traceID], again[traceID], "each run is a trace of its own")
	assert.Equal(t, again[traceID], send[traceID])
}
