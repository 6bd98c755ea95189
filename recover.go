package recovery

// What a pass does about one worker that is, or may be, dead.

// recoverSoon sees to a worker that is known to be dead, between passes.
func (s *sweeper) recoverSoon(id string) {
	p := s.newPass(s.r.hard)
	p.over = true // nobody asks for its result
	p.recover(id)
}

// recoverWorker claims a dead worker's leases, page by page, until there is nothing to do now. While one page is handed back, the next is
// being claimed and counted.
func (p *pass) recoverWorker(id string) {
	c, err := p.r.claim(p.ctx, id, false)
	for progress := true; ; {
		if err != nil {
			p.fail(err)
			return
		}
		if p.tellVerdict(id, c); c.verdict != verdictDead {
			p.leave(id, c)
			return
		}
		var next func() (*claim, error)
		if progress && len(c.leases) >= claimLeases/2 { // there are more, most likely
			next = p.claimSoon(id)
		}
		progress = p.handBack(c)
		c = nil
		if next != nil {
			// What it claimed must be offered. That it claimed nothing may be because these were not yet handed back.
			n, err := next()
			if err != nil {
				p.fail(err)
			} else if n.verdict == verdictDead {
				c = n
			}
		}
		if c == nil {
			if !progress || p.ctx.Err() != nil {
				return // what was refused, and falls due again meanwhile, is for the next pass
			}
			c, err = p.r.claim(p.ctx, id, false)
		}
	}
}

// leave is for a worker of which nothing is to be claimed now.
func (p *pass) leave(id string, c *claim) {
	if c.verdict != verdictEmpty {
		p.watchFor(id, c.wait)
		return
	}
	if err := p.r.deregister(p.ctx, id); err != nil {
		p.fail(err)
		return
	}
	p.count(func(s *SweepReport) { s.Retired++ })
}

// claimSoon begins a claim, and answers how to wait for it. What handBack would do first is done by then, too.
func (p *pass) claimSoon(id string) func() (*claim, error) {
	var c *claim
	var err error
	done := make(chan struct{})
	p.r.group.spawn(func() {
		defer close(done)
		if c, err = p.r.claim(p.ctx, id, false); err == nil {
			p.r.readClaim(p.ctx, c)
		}
	})
	return func() (*claim, error) {
		<-done
		return c, err
	}
}

func (p *pass) tellVerdict(id string, c *claim) {
	log := p.r.log
	if c.damaged > 0 {
		log.Error("recovery: keys of the wrong type were put aside", "worker", id, "keys", c.damaged, "aside", p.r.keys.worker(id).damaged)
	}
	switch {
	case c.verdict == verdictAlive:
		p.count(func(s *SweepReport) { s.Alive++ })
	case c.verdict == verdictSuspect:
		p.count(func(s *SweepReport) { s.Suspected++ })
		if c.news {
			p.r.counts.suspected.Add(1)
			log.Warn("recovery: worker suspected dead", "worker", id, "wait", c.wait, "by", p.r.WorkerID())
			emit(log, p.r.cfg.Events.Suspected, SuspectedInfo{Worker: id, Wait: c.wait})
		}
	case c.news:
		p.count(func(s *SweepReport) { s.Fenced++ })
		p.r.counts.fencedPeers.Add(1)
		log.Warn("recovery: worker declared dead", "worker", id, "by", p.r.WorkerID())
	}
}

// handBack reports whether there was progress.
func (p *pass) handBack(c *claim) bool {
	h := p.r.handBack(p.ctx, c)
	p.count(func(s *SweepReport) {
		s.HandedBack += h.handedBack
		s.Postponed += h.postponed
		s.Buried += h.buried
	})
	if h.err != nil {
		p.fail(h.err)
	}
	return h.handedBack+h.buried > 0 || h.forgotten > 0 && h.err == nil || len(c.leases) == 0
}
