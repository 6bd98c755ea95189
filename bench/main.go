// Bench measures the library against plain go-redis and against job systems, on a redis-server of its own, and writes docs/benchmarks.md. Every
// comparison is made in one run, in turn, again and again; what is reported are medians and ratios, because machines are noisy.
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"runtime/pprof"
	"strings"
	"time"
)

func main() {
	if kind := os.Getenv(childEnv); kind != "" {
		log.Fatal(beChild(kind, os.Getenv(addrEnv)))
	}
	quick := flag.Bool("quick", false, "fewer repeats, no waiting for crashes of other systems; prints, and writes nothing")
	out := flag.String("out", "../docs", "directory for benchmarks.md and benchmarks.svg")
	only := flag.String("only", "", "one section: "+strings.Join(sectionNames(), ", "))
	profile := flag.String("cpuprofile", "", "write a CPU profile of this process to a file")
	flag.Parse()
	if err := run(*quick, *out, *only, *profile); err != nil {
		log.Fatal(err)
	}
}

func run(quick bool, out, only, profile string) error {
	if profile != "" {
		f, err := os.Create(profile)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	srv, err := startServer()
	if err != nil {
		return err
	}
	defer srv.stop()
	s := &session{
		env:     env{srv: srv, addr: srv.addr, payload: make([]byte, 256)},
		quick:   quick,
		repeats: 5,
		span:    300 * time.Millisecond,
		began:   time.Now(),
	}
	if quick {
		s.repeats, s.span = 3, 200*time.Millisecond
	}
	for i := range s.payload {
		s.payload[i] = 'x'
	}
	for _, sec := range sections {
		if only != "" && sec.name != only || only == "" && quick && sec.name == "crash" { // half a minute, for what is in fake time tested anyway
			continue
		}
		fmt.Fprintf(os.Stderr, "%s ", sec.name)
		if err := sec.run(s); err != nil {
			return fmt.Errorf("%s: %w", sec.name, err)
		}
		fmt.Fprintln(os.Stderr)
	}
	text := s.markdown(only == "")
	fmt.Println(text)
	if quick || only != "" {
		return nil
	}
	if err := os.WriteFile(out+"/benchmarks.svg", []byte(s.chart()), 0o644); err != nil {
		return err
	}
	return os.WriteFile(out+"/benchmarks.md", []byte(text), 0o644)
}
