package main

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"
)

// screen shows lines that stay, and on a terminal below them a few rows that are redrawn in place.
type screen struct {
	out   io.Writer
	live  bool
	color bool
	began time.Time
	rows  []string // as last drawn
}

func newScreen(out *os.File, rows int) *screen {
	info, err := out.Stat()
	terminal := err == nil && info.Mode()&os.ModeCharDevice != 0 && os.Getenv("TERM") != "dumb" && runtime.GOOS != "windows"
	return &screen{
		out:   out,
		live:  terminal && rows <= 15, // rows that have scrolled away can't be redrawn
		color: terminal && os.Getenv("NO_COLOR") == "",
		began: time.Now(),
	}
}

type color string

const (
	plain color = ""
	red   color = "\x1b[31m"
	green color = "\x1b[32m"
	faint color = "\x1b[2m"
)

func (s *screen) paint(c color, text string) string {
	if !s.color || c == plain {
		return text
	}
	return string(c) + text + "\x1b[0m"
}

// say adds a line that stays: when, who, what.
func (s *screen) say(c color, who, format string, args ...any) {
	line := fmt.Sprintf("%5.1fs  %-6s %s", time.Since(s.began).Seconds(), who, fmt.Sprintf(format, args...))
	s.write([]string{s.paint(c, line)}, s.rows)
}

// draw replaces the rows. It does nothing where they could not be replaced.
func (s *screen) draw(rows []string) {
	if s.live {
		s.write(nil, rows)
	}
}

// write puts lines above the rows, in a single write so that nothing flickers. Long rows are cut by the terminal (autowrap is off
// while they are drawn): one that wrapped would spoil the count of rows to go up.
func (s *screen) write(lines, rows []string) {
	var b strings.Builder
	if len(s.rows) > 0 {
		fmt.Fprintf(&b, "\x1b[%dA\r\x1b[J", len(s.rows))
	}
	for _, line := range lines {
		b.WriteString(line + "\n")
	}
	if len(rows) > 0 {
		b.WriteString("\x1b[?7l" + strings.Join(rows, "\n") + "\n\x1b[?7h")
	}
	s.rows = rows
	_, _ = io.WriteString(s.out, b.String())
}
