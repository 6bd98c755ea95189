package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"time"
)

func main() {
	repeats := flag.Int("repeats", 3, "")
	d := flag.Duration("d", 300*time.Millisecond, "")
	gl := flag.String("g", "1,16,128,1024", "")
	beside := flag.Int("beside", 1000, "")
	only := flag.String("only", "", "")
	what := flag.String("what", "track", "")
	prof := flag.String("prof", "", "")
	flag.Parse()
	if *prof != "" {
		f, _ := os.Create(*prof)
		pprof.StartCPUProfile(f)
		defer pprof.StopCPUProfile()
	}
	srv, err := startServer()
	if err != nil {
		log.Fatal(err)
	}
	defer srv.stop()
	e := env{srv: srv, addr: srv.addr, payload: make([]byte, 256)}
	if *what == "drain" {
		for range *repeats {
			for _, dr := range drainers {
				f, err := e.drains(dr, 20000, 64)
				fmt.Println(dr.name, fmt.Sprintf("%.0f/s cpu %v redis %v allocs %.0f wire %.0f", f.rate, f.clientCPU, f.redis, f.allocs, f.wire), err)
			}
		}
		return
	}
	if *what == "recover" {
		for range *repeats {
			for _, c := range []struct{ list, fetched bool }{{false, false}, {true, false}, {true, true}} {
				res, err := e.orphans(10000, c.list, c.fetched)
				fmt.Println(c, fmt.Sprintf("%.0f/s redis %v stall %v wire %.0f", res.rate, res.redis, res.stall, res.wire), err)
			}
			p, err := e.livePass(10000)
			fmt.Println("pass", p, err)
		}
		for _, n := range []int{1, 100000} {
			b, s, err := e.beats(n)
			fmt.Println("beat", n, b, s, err)
		}
		m, err := e.memory(100000)
		fmt.Println("memory", m, err)
		return
	}
	cancellable, cancel := context.WithCancel(bg)
	defer cancel()
	for _, g := range gs(*gl) {
		all := []subject{plain(*beside), tracked("recovery", *beside, bg), tracked("recovery ctx", *beside, cancellable)}
		if *only != "" {
			all = slices.DeleteFunc(all, func(s subject) bool { return s.name != *only })
		}
		m, err := e.compare(all, g, *repeats, *d)
		if err != nil {
			log.Fatal(err)
		}
		for _, name := range []string{"plain", "recovery", "recovery ctx"} {
			f := m[name]
			fmt.Printf("%4d %-14s %8.0f/s x%.2f p50 %v p99 %v cpu %v redis %v (x%.2f) allocs %.1f wire %.0f\n", g, name, f.rate, f.rate/m["plain"].rate, f.p50, f.p99, f.clientCPU, f.redis,
				float64(f.redis)/float64(m["plain"].redis), f.allocs, f.wire)
		}
	}
}

func gs(s string) (out []int) {
	for _, x := range strings.Split(s, ",") {
		n, _ := strconv.Atoi(x)
		out = append(out, n)
	}
	return out
}
