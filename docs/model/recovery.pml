/*
 * The recovery protocol as a Promela model. README.md says what is in it, check.sh runs it.
 *
 * Two worker processes, 0 and 1. Each has up to two incarnations: 0 and 1 of worker 0, 2 and 3 of worker 1. Each incarnation
 * tracks up to NJ jobs, so there is one lease for each incarnation and job. Names are never used twice, so leases do not meet:
 * a job that was handed back and runs again is just another lease.
 *
 * One Redis script, or one plain command, is one atomic step. Everything may happen between two of them. A pause of a process
 * is that the others go on meanwhile.
 *
 * Every fault costs one of FAULTS: crash, pause (a beat or a claim runs out although its owner lives), lost reply, late copy,
 * an Enqueuer that fails; and so do two things that are no faults: Stop, and a job that its own worker gives up.
 */
#ifndef NJ
#define NJ 1            /* jobs for each incarnation */
#endif
#ifndef FAULTS
#define FAULTS 2
#endif
#ifndef HOLDERS
#define HOLDERS 15      /* which incarnations track jobs, a bit for each: leases do not meet, so not all are needed at a time */
#endif
#define NI 4
#define NT (NI*NJ)
#define W(i)   ((i)/2)
#define T(i,j) ((i)*NJ+(j))
#define FIRST(i) ((i)%2==0)

/* session */
#define ABSENT 0
#define LIVE 1
#define FENCED 2

/* where Redis has a lease */
#define NOWHERE 0
#define INFLIGHT 1
#define CLAIMED 2
#define DUE 3           /* claimed, and the claim has run out */
#define HANDED 4

/* what its own process knows of a lease */
#define FREE 0
#define BEGUN 1         /* Track has looked whether the incarnation is over */
#define AGAIN 2         /* the client sends Track once more */
#define SENT 3          /* Track was answered, the answer is on its way */
#define ASKED 4         /* Track was refused: ask where the lease is */
#define OWED 5          /* Track's outcome is unknown: the lane owes a removal */
#define OWED2 6         /* the removal has its number */
#define ACTIVE 7        /* Track returned nil, the holder runs the job */
#define FINISHING 8     /* Done was called */
#define MISSING 9       /* not in the index: ask where the lease is */
#define GIVING 10       /* the holder was told; this process answers for the lease */
#define TAKEN 11        /* in this worker's own claims */
#define HOMELESS 12     /* Redis does not know it: only this process has it */
#define ENQUEUED 13     /* the Enqueuer has it, forget is next */
#define SETTLED 14      /* an owed removal was done */
#define OVER 15

/* answers of track.lua */
#define TRACKED 1
#define REFUSED 2
#define BEFORE 3        /* not live any more, but a copy was tracked while it was */

/* the heart of a worker */
#define REGISTER 0
#define JOIN 1
#define UNDO 2          /* a join of unknown outcome, or a refused one: fence ... */
#define UNDO2 3         /* ... then out of the registry */
#define RUN 4
#define FULL 6
#define TOLDFENCED 7    /* the registry entry, which goes with the beat, is next */
#define TOLDABSENT 8
#define PART 9
#define FENCEOWN 10
#define LEAVE 11
#define LEAVE2 12
#define LEFT 13
#define ENDED 14        /* no third id in this model: the heart is still, the rest of the process goes on */

/* the sweeper of a worker */
#define IDLE 0
#define CLAIM 1
#define COUNT 2
#define ENQUEUE 3
#define FORGET 4
#define RETIRE 5

/* ---- Redis ---- */
bit  reg[NI];
byte ses[NI];
bit  beat[NI];
bit  suspect[NI];
byte place[NT];
byte lane[NT];          /* the last number that was accepted: 1 Track, 2 the owed removal */

/* ---- the network: copies that will arrive later ---- */
bit lateTrack[NT];
bit lateJoin[NI];

/* ---- processes ---- */
bit  alive[2];
byte cur[2];            /* incarnation */
byte heart[2];
bit  dead[NI];          /* the process of this incarnation is gone */
bit  over[NI];          /* closed: no lease can become active */
#ifdef SESSIONLOSS
bit  lost[NI];          /* closed because the session was absent */
#endif
#ifdef RETENTION
bit  away[NI];          /* cut off for longer than InflightTTL */
#endif
byte hold[NT];
byte ans[NT];
byte sp[2]; byte si[2]; byte sj[2];

/* ---- ghosts: what has happened, for the checks only ---- */
bit promised[NT];       /* Track returned nil, or ErrLost: the job must not be forgotten */
bit finished[NT];       /* removed by Done, or Done returned nil */
bit refused[NT];        /* Track returned "certainly not recorded": its caller tracks the job again */
bit enqueued[NT];

byte faults;
#define FAULT (faults < FAULTS)
#ifdef LIVENESS
#define MAYDIE(w) (w == 0)   /* the other one survives */
#else
#define MAYDIE(w) (1)
#endif

/* Properties: assert(name) fails by that name. */
hidden byte no_loss;
hidden byte no_silent_double;
hidden byte no_false_loss;
hidden byte no_hidden_worker;
hidden byte handed_after_enqueue;
hidden byte live_means_mine;
hidden byte settled_means_gone;
hidden byte late;       /* the answer to a late copy: nobody hears it */
#define CHECK(c,name) if :: !(c) -> assert(name) :: else fi

#define HAS(t)  (place[t] == INFLIGHT || place[t] == CLAIMED || place[t] == DUE)
#define LOSS(t) (promised[t] && !finished[t] && !enqueued[t] && !HAS(t))
#if NJ == 1
#define HOLDS(i) (HAS(i))
#else
#define HOLDS(i) (HAS(T(i,0)) || HAS(T(i,1)))
#endif
#define HIDDEN(i) (!reg[i] && (ses[i] == LIVE || HOLDS(i)))

#ifdef RETENTION
#define AWAY(i) (away[i])
#else
#define AWAY(i) (0)
#endif

/* ------------------------------ scripts ------------------------------ */

#ifdef NO_POSITIVE_STATE
#define MAYTRACK(i) (ses[i] != FENCED)
#else
#define MAYTRACK(i) (ses[i] == LIVE)
#endif
#ifdef NO_LANE_NUMBERS
#define FRESH(t) (1)
#else
#define FRESH(t) (lane[t] < 1)
#endif
#ifdef TRUST_REFUSAL
#define COPY REFUSED
#else
#define COPY BEFORE
#endif

/* track.lua */
inline s_track(i,t,r) {
  if
  :: MAYTRACK(i) && FRESH(t) -> lane[t] = 1; place[t] = INFLIGHT; r = TRACKED
  :: MAYTRACK(i) && !FRESH(t) -> r = TRACKED
  :: !MAYTRACK(i) && lane[t] >= 1 -> r = COPY
  :: !MAYTRACK(i) && lane[t] < 1 -> r = REFUSED
  fi }

/* join.lua */
inline s_join(i) { if :: ses[i] == ABSENT -> ses[i] = LIVE; beat[i] = 1 :: else fi }

/* leave.lua */
inline s_leave(i) { ses[i] = FENCED; beat[i] = 0; suspect[i] = 0 }

/* forget.lua */
inline s_forget(t) {
#ifndef FORGET_BEFORE_ENQUEUE
  CHECK(enqueued[t], handed_after_enqueue);
#endif
  if :: place[t] != INFLIGHT -> place[t] = HANDED :: else fi }

inline enqueue(t) {
  CHECK(!finished[t] && !refused[t], no_silent_double);
  enqueued[t] = 1 }

#ifdef LIVENESS
#define rest(w) sp[w] = IDLE; sj[w] = 0
#else
#define rest(w) sp[w] = IDLE; si[w] = 0; sj[w] = 0
#endif

/* claim.lua, from the fence on: sets the sweeper's next step */
inline s_take(w,i) {
  if
  :: place[T(i,0)] == INFLIGHT || place[T(i,0)] == DUE -> place[T(i,0)] = CLAIMED; sj[w] = 0; sp[w] = COUNT
#if NJ > 1
  :: place[T(i,1)] == INFLIGHT || place[T(i,1)] == DUE -> place[T(i,1)] = CLAIMED; sj[w] = 1; sp[w] = COUNT
#endif
  :: else ->
       if
       :: !HOLDS(i) -> sp[w] = RETIRE
       :: else -> rest(w)
       fi
  fi }

inline s_due(w,i) {      /* claim.lua with own = 1 */
  if
  :: place[T(i,0)] == DUE -> place[T(i,0)] = CLAIMED; sj[w] = 0; sp[w] = COUNT
#if NJ > 1
  :: place[T(i,1)] == DUE -> place[T(i,1)] = CLAIMED; sj[w] = 1; sp[w] = COUNT
#endif
  :: else -> rest(w)
  fi }

/* A lease to which nothing can happen any more is wiped: fewer states. Not one that is lost. */
#define SWEPT(t) ((sp[0] >= COUNT && sp[0] <= FORGET && T_(0) == t) || (sp[1] >= COUNT && sp[1] <= FORGET && T_(1) == t))
#define T_(w) T(si[w],sj[w])
#define FINAL(t) ((hold[t] == OVER || hold[t] == SETTLED) && (place[t] == NOWHERE || place[t] == HANDED) && !lateTrack[t] && !SWEPT(t) && !LOSS(t))
inline tidy(t) {
  if
  :: FINAL(t) -> hold[t] = OVER; place[t] = NOWHERE; lane[t] = 0; promised[t] = 0; finished[t] = 0; refused[t] = 0; enqueued[t] = 0
  :: else
  fi }

/* ------------------------------ a lease ------------------------------ */

/* "Not there" proves nothing if the proof may have expired: then Done assumes the worst. */
#ifdef AWAY_ONLY_IF_ABSENT
#define WORST(i) (AWAY(i) && ses[i] == ABSENT)
#else
#define WORST(i) AWAY(i)
#endif

#define RUNNING(w) (heart[w] >= RUN && heart[w] <= FULL)

proctype Lease(byte i; byte j) {
  do
  /* Track */
  :: atomic { !dead[i] && hold[T(i,j)] == FREE && cur[W(i)] == i && RUNNING(W(i)) && !over[i] -> hold[T(i,j)] = BEGUN }
  :: atomic { !dead[i] && hold[T(i,j)] == BEGUN ->
       if
       :: s_track(i,T(i,j),ans[T(i,j)]); hold[T(i,j)] = SENT
       :: FAULT -> faults++; s_track(i,T(i,j),ans[T(i,j)]); lateTrack[T(i,j)] = 1; hold[T(i,j)] = SENT
       :: FAULT -> faults++; s_track(i,T(i,j),ans[T(i,j)]); ans[T(i,j)] = 0; hold[T(i,j)] = AGAIN  /* reply lost, the client repeats */
       :: FAULT -> faults++; s_track(i,T(i,j),ans[T(i,j)]); ans[T(i,j)] = 0; hold[T(i,j)] = OWED   /* reply lost for good */
       :: FAULT -> faults++; lateTrack[T(i,j)] = 1; hold[T(i,j)] = OWED                            /* not executed yet */
       fi }
  :: atomic { !dead[i] && hold[T(i,j)] == AGAIN -> s_track(i,T(i,j),ans[T(i,j)]); hold[T(i,j)] = SENT }
  :: atomic { !dead[i] && hold[T(i,j)] == SENT ->
       if
       :: ans[T(i,j)] == TRACKED && !over[i] -> promised[T(i,j)] = 1; hold[T(i,j)] = ACTIVE
#ifdef SESSIONLOSS
#ifdef CLOSED_MEANS_NOT_RECORDED
       :: ans[T(i,j)] == TRACKED && over[i] && lost[i] -> refused[T(i,j)] = 1; hold[T(i,j)] = OVER
#else
       :: ans[T(i,j)] == TRACKED && over[i] && lost[i] -> hold[T(i,j)] = ASKED
#endif
       :: ans[T(i,j)] == TRACKED && over[i] && !lost[i] -> promised[T(i,j)] = 1; hold[T(i,j)] = OVER
#else
       :: ans[T(i,j)] == TRACKED && over[i] -> promised[T(i,j)] = 1; hold[T(i,j)] = OVER           /* ErrLost */
#endif
       :: ans[T(i,j)] == BEFORE -> promised[T(i,j)] = 1; hold[T(i,j)] = OVER                       /* ErrLost */
#ifdef TRUST_REFUSAL
       :: ans[T(i,j)] == REFUSED -> refused[T(i,j)] = 1; hold[T(i,j)] = OVER
#else
       :: ans[T(i,j)] == REFUSED -> hold[T(i,j)] = ASKED
#endif
       fi; ans[T(i,j)] = 0; tidy(T(i,j)) }
  :: atomic { !dead[i] && hold[T(i,j)] == ASKED ->                                                 /* where.lua */
       if
       :: place[T(i,j)] == NOWHERE -> refused[T(i,j)] = 1
       :: else -> promised[T(i,j)] = 1
       fi; hold[T(i,j)] = OVER; tidy(T(i,j)) }
  /* a Track of unknown outcome is taken back, by the same lane and under a new number */
  :: atomic { !dead[i] && hold[T(i,j)] == OWED ->
#ifndef OTHER_LANE
       if :: ses[i] == LIVE -> lane[T(i,j)] = 2 :: else fi;
#endif
       hold[T(i,j)] = OWED2 }
  :: atomic { !dead[i] && hold[T(i,j)] == OWED2 ->                                                 /* done.lua */
       if :: place[T(i,j)] == INFLIGHT -> place[T(i,j)] = NOWHERE :: else fi;
       hold[T(i,j)] = SETTLED; tidy(T(i,j)) }
  /* Done */
  :: atomic { !dead[i] && hold[T(i,j)] == ACTIVE -> hold[T(i,j)] = FINISHING }
  :: atomic { !dead[i] && hold[T(i,j)] == FINISHING ->                                             /* done.lua */
       if
       :: place[T(i,j)] == INFLIGHT -> CHECK(!enqueued[T(i,j)], no_silent_double);
            place[T(i,j)] = NOWHERE; finished[T(i,j)] = 1;
            if
            :: hold[T(i,j)] = OVER; tidy(T(i,j))
            :: FAULT -> faults++                                                                   /* reply lost: it is repeated */
            fi
       :: else -> hold[T(i,j)] = MISSING
       fi }
  :: atomic { !dead[i] && hold[T(i,j)] == MISSING ->                                               /* where.lua */
       if
#if defined(NOT_THERE_MEANS_LOST)
       :: CHECK(!finished[T(i,j)], no_false_loss)
#elif defined(NOT_THERE_MEANS_NIL)
       :: CHECK(!enqueued[T(i,j)], no_silent_double); finished[T(i,j)] = 1
#else
       :: place[T(i,j)] == CLAIMED || place[T(i,j)] == DUE || place[T(i,j)] == HANDED || WORST(i) -> CHECK(!finished[T(i,j)] || AWAY(i), no_false_loss)
       :: else -> CHECK(!enqueued[T(i,j)], no_silent_double); finished[T(i,j)] = 1
#endif
       fi; hold[T(i,j)] = OVER; tidy(T(i,j)) }
  /* its own worker gives it up: a panic, a timeout. The holder is told first. Later also what was lost: see part */
  :: atomic { !dead[i] && hold[T(i,j)] == ACTIVE && FAULT -> faults++; hold[T(i,j)] = GIVING }
  :: atomic { !dead[i] && hold[T(i,j)] == GIVING ->                                                /* take.lua, where.lua */
       if
       :: place[T(i,j)] == INFLIGHT -> place[T(i,j)] = CLAIMED; hold[T(i,j)] = TAKEN
       :: place[T(i,j)] == NOWHERE -> hold[T(i,j)] = HOMELESS
       :: else -> hold[T(i,j)] = OVER; tidy(T(i,j))
       fi }
  :: atomic { !dead[i] && (hold[T(i,j)] == TAKEN || hold[T(i,j)] == HOMELESS) -> enqueue(T(i,j)); hold[T(i,j)] = ENQUEUED }
  :: atomic { !dead[i] && hold[T(i,j)] == TAKEN && FAULT -> faults++; hold[T(i,j)] = OVER }        /* refused: it stays in the claims */
  :: atomic { !dead[i] && hold[T(i,j)] == ENQUEUED -> s_forget(T(i,j)); hold[T(i,j)] = OVER; tidy(T(i,j)) }
  od }

/* ------------------------------ the heart ------------------------------ */

#if NJ == 1
#define EACH(i,f) f(T(i,0))
#else
#define EACH(i,f) f(T(i,0)); f(T(i,1))
#endif

/* "live": nobody has taken anything */
#define good1(t) CHECK(hold[t] != ACTIVE || place[t] == INFLIGHT, live_means_mine)
#define good(i) EACH(i,good1)

/* lose: the holder is told, the process answers for the lease until somebody else has it */
#define lose1(t) hold[t] = (hold[t] == ACTIVE -> GIVING : hold[t])
#define lose(i) EACH(i,lose1)

/* part: a lease that Redis does not know is kept and tracked again. Here Redis loses no records, so that must not happen to one
 * that somebody else has. */
#ifdef UNKNOWN_IS_KEPT
#define KEEP(i) (1)
#else
#define KEEP(i) (!AWAY(i))
#endif
#define part1(t) if :: hold[t] == ACTIVE && place[t] == NOWHERE && KEEP(t/NJ) -> CHECK(!enqueued[t], no_silent_double) :: else -> lose1(t) fi
#define part(i) EACH(i,part1)

inline next(w) {
  if
  :: FIRST(cur[w]) -> cur[w] = cur[w] + 1; heart[w] = REGISTER
  :: else -> heart[w] = ENDED
  fi }

inline rejoin(w) {
#if defined(RETENTION) && defined(AWAY_IS_FORGOTTEN)
  away[cur[w]] = 0;
#endif
  next(w) }

proctype Heart(byte w) {
  do
#ifdef SESSION_BEFORE_REGISTRY
  :: atomic { alive[w] && heart[w] == REGISTER -> s_join(cur[w]); heart[w] = (ses[cur[w]] == LIVE -> JOIN : UNDO) }
  :: atomic { alive[w] && heart[w] == JOIN -> reg[cur[w]] = 1; heart[w] = RUN }
#else
  :: atomic { alive[w] && heart[w] == REGISTER -> reg[cur[w]] = 1; heart[w] = JOIN }
  :: atomic { alive[w] && heart[w] == JOIN ->
       if
       :: s_join(cur[w]); heart[w] = (ses[cur[w]] == LIVE -> RUN : UNDO)
       :: FAULT -> faults++; s_join(cur[w]); lateJoin[cur[w]] = 1; heart[w] = (ses[cur[w]] == LIVE -> RUN : UNDO)
       :: FAULT -> faults++; s_join(cur[w]); heart[w] = UNDO                                       /* reply lost for good */
       :: FAULT -> faults++; lateJoin[cur[w]] = 1; heart[w] = UNDO                                 /* not executed yet */
       fi }
#endif
  :: atomic { alive[w] && heart[w] == UNDO ->
#ifndef UNDO_WITHOUT_FENCE
       s_leave(cur[w]);
#endif
       heart[w] = UNDO2 }
  :: atomic { alive[w] && heart[w] == UNDO2 -> reg[cur[w]] = 0; over[cur[w]] = 1; next(w) }

  /* A light beat: SET XX, then the state. SET XX changes nothing but a time, so both are one step. If either says no, the script decides */
  :: atomic { alive[w] && heart[w] == RUN && ses[cur[w]] == LIVE && beat[cur[w]] -> good(cur[w]); reg[cur[w]] = 1 }
  :: atomic { alive[w] && heart[w] == RUN && (ses[cur[w]] != LIVE || !beat[cur[w]]) -> heart[w] = FULL }
  :: atomic { alive[w] && heart[w] == FULL ->                                                      /* beat.lua */
       if
       :: ses[cur[w]] == LIVE -> beat[cur[w]] = 1; suspect[cur[w]] = 0; good(cur[w]); reg[cur[w]] = 1; heart[w] = RUN
       :: ses[cur[w]] == FENCED -> heart[w] = TOLDFENCED
       :: ses[cur[w]] == ABSENT -> heart[w] = TOLDABSENT
       fi }
  :: atomic { alive[w] && heart[w] == TOLDFENCED -> reg[cur[w]] = 1; over[cur[w]] = 1; heart[w] = PART }
  :: atomic { alive[w] && heart[w] == TOLDABSENT -> reg[cur[w]] = 1;
       if
       :: AWAY(cur[w]) -> over[cur[w]] = 1; lose(cur[w]); rejoin(w)                                /* abandon */
       :: else ->
#ifdef SESSIONLOSS
            if :: !over[cur[w]] -> lost[cur[w]] = 1 :: else fi;
#endif
            over[cur[w]] = 1; heart[w] = FENCEOWN
       fi }
  :: atomic { alive[w] && heart[w] == FENCEOWN -> s_leave(cur[w]); heart[w] = PART }
  :: atomic { alive[w] && heart[w] == PART -> part(cur[w]); rejoin(w) }                            /* where.lua */

  /* Stop. The sweeper's own steps hand back what is left, and take the worker out of the registry */
#ifdef STOP
  :: atomic { alive[w] && heart[w] == RUN && FAULT && sp[w] == IDLE && MAYDIE(w) -> faults++; over[cur[w]] = 1; lose(cur[w]); heart[w] = LEAVE }
#ifdef SREM_BEFORE_FENCE
  :: atomic { alive[w] && heart[w] == LEAVE -> reg[cur[w]] = 0; heart[w] = LEAVE2 }
  :: atomic { alive[w] && heart[w] == LEAVE2 && sp[w] == IDLE -> s_leave(cur[w]); si[w] = cur[w]; sp[w] = CLAIM; heart[w] = LEFT }
#else
  :: atomic { alive[w] && heart[w] == LEAVE && sp[w] == IDLE -> s_leave(cur[w]); si[w] = cur[w]; sp[w] = CLAIM; heart[w] = LEFT }
#endif
#endif
  od }

/* ------------------------------ the sweeper ------------------------------ */

/* look: a hint. Those that live are left alone */
#define SILENT(i) (reg[i] && !beat[i])
#if NJ == 1
#define OWNDUE(w) (ses[cur[w]] == LIVE && place[T(cur[w],0)] == DUE)
#else
#define OWNDUE(w) (ses[cur[w]] == LIVE && (place[T(cur[w],0)] == DUE || place[T(cur[w],1)] == DUE))
#endif
/* A look that falls between the two steps of a join is as rare as a fault, and costs one. */
#define JOINING(i) (heart[W(i)] == JOIN && cur[W(i)] == i && ses[i] == ABSENT)
#define LOOKS(w,i) ((SILENT(i) && (!JOINING(i) || FAULT)) || (i == cur[w] && OWNDUE(w)))
inline look(w,i) { faults = faults + JOINING(i); si[w] = i; sp[w] = CLAIM }
#define SWEEPS(w) (alive[w] && heart[w] != LEAVE && heart[w] != LEAVE2 && heart[w] != LEFT)

proctype Sweep(byte w) {
  do
#ifdef LIVENESS
  :: atomic { SWEEPS(w) && sp[w] == IDLE -> si[w] = (si[w] + 1) % NI;                              /* one after the other */
       if :: LOOKS(w,si[w]) -> look(w,si[w]) :: else fi }
#else
  :: atomic { SWEEPS(w) && sp[w] == IDLE && LOOKS(w,0) -> look(w,0) }
  :: atomic { SWEEPS(w) && sp[w] == IDLE && LOOKS(w,1) -> look(w,1) }
  :: atomic { SWEEPS(w) && sp[w] == IDLE && LOOKS(w,2) -> look(w,2) }
  :: atomic { SWEEPS(w) && sp[w] == IDLE && LOOKS(w,3) -> look(w,3) }
#endif
  /* claim.lua: one step decides, fences and takes */
  :: atomic { alive[w] && sp[w] == CLAIM ->
       if
       :: ses[si[w]] == LIVE && beat[si[w]] && si[w] == cur[w] -> s_due(w,si[w])
       :: ses[si[w]] == LIVE && beat[si[w]] && si[w] != cur[w] -> rest(w)
       :: ses[si[w]] == LIVE && !beat[si[w]] && !suspect[si[w]] -> suspect[si[w]] = 1; rest(w)
#ifndef LIVENESS
       :: ses[si[w]] == LIVE && !beat[si[w]] && suspect[si[w]] -> rest(w)                          /* not yet confirmed */
#endif
       :: ses[si[w]] == LIVE && !beat[si[w]] && suspect[si[w]] ->
#ifndef NO_FENCE
            s_leave(si[w]);
#endif
            s_take(w,si[w])
       :: ses[si[w]] == FENCED -> s_take(w,si[w])
       :: ses[si[w]] == ABSENT ->
#ifndef NO_FENCE_ABSENT
            s_leave(si[w]);
#endif
            s_take(w,si[w])
       fi;
       if
       :: true
       :: FAULT && sp[w] != IDLE -> faults++; rest(w)                                              /* reply lost */
       fi }
  :: atomic { alive[w] && sp[w] == COUNT -> sp[w] = ENQUEUE }
#ifdef FORGET_BEFORE_ENQUEUE
  :: atomic { alive[w] && sp[w] == ENQUEUE -> s_forget(T_(w)); sp[w] = FORGET }
  :: atomic { alive[w] && sp[w] == FORGET -> enqueue(T_(w)); sp[w] = CLAIM; tidy(T_(w)); sj[w] = 0 }
#else
  :: atomic { alive[w] && sp[w] == ENQUEUE ->
       if
       :: enqueue(T_(w)); sp[w] = FORGET
       :: FAULT -> faults++; rest(w)                                                               /* refused */
       :: FAULT -> faults++; enqueue(T_(w)); rest(w)                                               /* taken, but the answer was an error */
       fi }
  :: atomic { alive[w] && sp[w] == FORGET ->
       if
       :: s_forget(T_(w)); sp[w] = CLAIM; tidy(T_(w)); sj[w] = 0
       :: FAULT -> faults++; rest(w)                                                               /* not executed */
       fi }
#endif
  :: atomic { alive[w] && sp[w] == RETIRE -> reg[si[w]] = 0; rest(w) }
  od }

/* ------------------------------ time, and the network ------------------------------ */

#define BEATS(i) (!dead[i] && cur[W(i)] == i && RUNNING(W(i)))
#define ATWORK(i,j) (SWEPT(T(i,j)) || (!dead[i] && (hold[T(i,j)] == TAKEN || hold[T(i,j)] == ENQUEUED)))

#if defined(CLAIM_EXPIRES_TO_DONE)
#define RANOUT INFLIGHT
#elif defined(CLAIM_NEVER_ENDS)
#define RANOUT CLAIMED
#else
#define RANOUT DUE
#endif

/* what happens by itself, sooner or later */
proctype Time(byte i) {
  do
  :: atomic { beat[i] && !BEATS(i) -> beat[i] = 0 }
  :: atomic { place[T(i,0)] == CLAIMED && !ATWORK(i,0) -> place[T(i,0)] = RANOUT }
#if NJ > 1
  :: atomic { place[T(i,1)] == CLAIMED && !ATWORK(i,1) -> place[T(i,1)] = RANOUT }
#endif
  od }

/* what need not happen */
#define gone(t) hold[t] = (hold[t] == SETTLED -> SETTLED : OVER); ans[t] = 0; tidy(t)
inline crash(w) {
  faults++; alive[w] = 0; sp[w] = IDLE; si[w] = 0; sj[w] = 0;
  dead[2*w] = 1; gone(T(2*w,0));
#if NJ > 1
  gone(T(2*w,1));
#endif
  if
  :: !FIRST(cur[w]) -> dead[2*w+1] = 1; gone(T(2*w+1,0));
#if NJ > 1
       gone(T(2*w+1,1))
#endif
  :: else
  fi;
  heart[w] = ENDED }

#define EXPIRES(i) (ses[i] == FENCED && !reg[i] && !HOLDS(i) && !dead[i] && cur[W(i)] == i && heart[W(i)] >= RUN && heart[W(i)] <= PART && !lateJoin[i])

proctype Chance(byte i) {
  do
  :: atomic { FAULT && beat[i] && BEATS(i) -> faults++; beat[i] = 0 }                              /* a pause */
  :: atomic { FAULT && place[T(i,0)] == CLAIMED && ATWORK(i,0) -> faults++; place[T(i,0)] = RANOUT }
  :: atomic { lateTrack[T(i,0)] -> lateTrack[T(i,0)] = 0; s_track(i,T(i,0),late); late = 0; tidy(T(i,0)) }
#if NJ > 1
  :: atomic { FAULT && place[T(i,1)] == CLAIMED && ATWORK(i,1) -> faults++; place[T(i,1)] = RANOUT }
  :: atomic { lateTrack[T(i,1)] -> lateTrack[T(i,1)] = 0; s_track(i,T(i,1),late); late = 0; tidy(T(i,1)) }
#endif
  :: atomic { lateJoin[i] -> lateJoin[i] = 0; s_join(i) }
#ifdef RETENTION
  /* the memory of a retired incarnation ends, InflightTTL after its worker was last heard of */
  :: atomic { FAULT && EXPIRES(i) -> faults++; ses[i] = ABSENT; away[i] = 1; lane[T(i,0)] = 0; place[T(i,0)] = NOWHERE;
#if NJ > 1
       lane[T(i,1)] = 0; place[T(i,1)] = NOWHERE
#endif
       }
#endif
#ifdef SESSIONLOSS
  /* Redis loses one key, the session */
  :: atomic { FAULT && ses[i] == LIVE && !lateJoin[i] -> faults++; ses[i] = ABSENT; lane[T(i,0)] = 0;
#if NJ > 1
       lane[T(i,1)] = 0
#endif
       }
#endif
  :: atomic { FAULT && FIRST(i) && alive[W(i)] && MAYDIE(W(i)) -> crash(W(i)) }
  :: atomic { !FIRST(i) && !alive[W(i)] && cur[W(i)] != i -> alive[W(i)] = 1; cur[W(i)] = i; heart[W(i)] = REGISTER }   /* started again */
  od }

/* ------------------------------ the checks ------------------------------ */

#ifndef LIVENESS
proctype Monitor() {
  do
  :: LOSS(0) || LOSS(1) || LOSS(2) || LOSS(3) -> assert(no_loss)
#if NJ > 1
  :: LOSS(4) || LOSS(5) || LOSS(6) || LOSS(7) -> assert(no_loss)
#endif
  :: HIDDEN(0) || HIDDEN(1) || HIDDEN(2) || HIDDEN(3) -> assert(no_hidden_worker)
#ifndef NO_LANE_NUMBERS         /* it breaks this, too; the double is worse */
  :: (hold[0] == SETTLED && place[0] == INFLIGHT) || (hold[NJ] == SETTLED && place[NJ] == INFLIGHT) -> assert(settled_means_gone)
  :: (hold[2*NJ] == SETTLED && place[2*NJ] == INFLIGHT) || (hold[3*NJ] == SETTLED && place[3*NJ] == INFLIGHT) -> assert(settled_means_gone)
#endif
  od }
#else
/* an orphan: Redis has it, and nobody runs it */
#define ORPHAN(t) (HAS(t) && (hold[t] == OVER || hold[t] >= GIVING && hold[t] <= ENQUEUED))
ltl handed_back { [] ((ORPHAN(0) -> <> !HAS(0)) && (ORPHAN(1) -> <> !HAS(1)) && (ORPHAN(2) -> <> !HAS(2)) && (ORPHAN(3) -> <> !HAS(3))) }
#endif

init { atomic {
  alive[0] = 1; alive[1] = 1; cur[1] = 2;
#if HOLDERS & 1
  run Lease(0,0);
#endif
#if HOLDERS & 2
  run Lease(1,0);
#endif
#if HOLDERS & 4
  run Lease(2,0);
#endif
#if HOLDERS & 8
  run Lease(3,0);
#endif
#if NJ > 1 && (HOLDERS & 1)
  run Lease(0,1);
#endif
#if NJ > 1 && (HOLDERS & 2)
  run Lease(1,1);
#endif
#if NJ > 1 && (HOLDERS & 4)
  run Lease(2,1);
#endif
#if NJ > 1 && (HOLDERS & 8)
  run Lease(3,1);
#endif
  run Heart(0); run Heart(1); run Sweep(0); run Sweep(1);
  run Time(0); run Time(1); run Time(2); run Time(3);
  run Chance(0); run Chance(1); run Chance(2); run Chance(3);
#ifndef LIVENESS
  run Monitor();
#endif
} }
