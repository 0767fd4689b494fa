/* The protocol by which ranks exchange segments through shared memory, as one state machine.
 *
 * Taken from the code, function by function: csrc/shm/segment_stream.cpp (begin, acquire,
 * publish, await, consume, end, hopeless, fail), wait.hpp (waitOn, publishWord), futex.hpp, and
 * group_memory.cpp (record, abort, recordOnAll, passOn, close). Every access to shared memory is a step of
 * its own. Each of N ranks runs COLLECTIVES collectives of SEGMENTS segments through a ring of RING.
 * With WRITES_BACK readers write their part of a segment, as in an all-reduce, and its owner reads the
 * parts of the segment before the present one; giveBack() of group_memory.cpp ends it.
 *
 * Shown for all interleavings:
 *   - no wake-up is lost: nobody sleeps for ever (no invalid end state). Slices of a wait end only
 *     where the wait is hopeless, so that they hide no lost wake-up of the ordinary way;
 *   - no segment, and no line of an arrival, is written again, nor its memory given back, before all
 *     have read it (the content of each read is checked, before a collective is reported as done);
 *   - with WRITES_BACK the owner finds all parts, and nobody writes into memory that was given back;
 *   - with MISMATCH every rank raises, without it none does;
 *   - with DEATH a rank dies at any step, and no survivor waits for ever;
 *   - the first cause that a rank recorded is the one that it raises with, and all raise the same.
 *
 * Not shown: weak memory order (the checker is sequentially consistent; ThreadSanitizer is for that),
 * deadlines, point-to-point. Seeded errors, one for each M_..., must all be found: check_model.py.
 */

#ifndef N
#define N 2
#endif
#ifndef RING
#define RING 2
#endif
#ifndef SEGMENTS
#define SEGMENTS 1
#endif
#ifndef COLLECTIVES
#define COLLECTIVES 3
#endif

#ifdef MISMATCH
#define DIFFERS 1
#else
#define DIFFERS 0
#endif
#ifdef DEATH
#define MORTAL 1
#else
#define MORTAL 0
#endif

#ifdef WRITES_BACK
#define BACK 1
#else
#define BACK 0
#endif

#define NONE 0
#define WRITING 1
#define SET 2

#define FREED 255
#define HALF 254 /* a write that is under way */

/* Progress: two words that only grow, and who sleeps, or is about to, on one of them. */
byte published[N];
byte consumed[N];
byte waiters[N];

/* Arrivals: two lines, used in turn, each with a position that peers wait for. The ring, by its
 * content: number of the segment plus one. */
byte arrival[N * 2];
byte position[N * 2];
byte ring[N * RING];
byte part[BACK * N * N * RING + 1]; /* what reader r has written into a slot of p, by p, r and slot */
#define PART(p, r, i) part[((p) * N + (r)) * RING + (i) % RING]

/* The life word (the kernel's) and `closed` or `bye` (the owner's). */
bool dead[N];
bool left[N];

/* AbortRecord. */
byte abortState[N];
byte abortCause[N];
byte writer[N];
byte firstCause[N]; /* what was written first; witnesses, not part of the protocol */
byte raisedCause;   /* what was raised first, on any rank */

/* The kernel's list of sleepers: the word that a rank sleeps on, 0 = it is awake. */
byte sleepsOn[N];

#ifdef M_ONE_ARRIVAL_LINE
#define LINE(c) 0
#else
#define LINE(c) ((c) % 2)
#endif

#define PUBLISHED 0
#define CONSUMED 1
#define ARRIVED(c) (2 + LINE(c))
#define WORD(kind, p) \
  (kind == PUBLISHED -> published[p] : (kind == CONSUMED -> consumed[p] : position[(p) * 2 + kind - 2]))
#define NAME(kind, p) (1 + 4 * (p) + kind)

/* Signatures are equal but for one rank's in one collective. */
#define SIGNATURE(r, c) (1 + (c) + (DIFFERS && (r) == 1 && (c) == 1 -> 100 : 0))

/* futexWakeAll */
inline wake(kind, p) {
  d_step {
    for (w : 0 .. N - 1) {
      if
      :: sleepsOn[w] == NAME(kind, p) -> sleepsOn[w] = 0
      :: else
      fi
    };
    w = 0
  }
}

/* publishWord: the store, then the look for sleepers. */
inline publishWord(kind, p, value) {
#ifdef M_LOOKS_BEFORE_STORE
  sleepers = waiters[p];
#endif
  if
  :: kind == PUBLISHED -> published[p] = value
  :: kind == CONSUMED -> consumed[p] = value
  :: else -> position[(p) * 2 + kind - 2] = value
  fi;
#ifndef M_LOOKS_BEFORE_STORE
  sleepers = waiters[p];
#endif
  if
  :: sleepers != 0 -> wake(kind, p)
  :: else
  fi;
  sleepers = 0
}

/* publish(): the first segment of a collective is what peers wait for to arrive. */
inline publish(i) {
  if
  :: i > next -> publishWord(PUBLISHED, me, i + 1)
  :: else ->
    published[me] = i + 1;
    publishWord(ARRIVED(c), me, i + 1)
  fi
}

/* checkWorthlessPeers, for one peer and as one expression: what ends a slice. */
#ifdef M_IGNORES_LIFE
#define GONE(p) left[p]
#else
#define GONE(p) (dead[p] || left[p])
#endif
#define WORTHLESS(p) (p != me && GONE(p) && (p == awaited || published[p] <= next))
#if N == 2
#define HOPELESS (abortState[me] != NONE || WORTHLESS(0) || WORTHLESS(1))
#else
#define HOPELESS (abortState[me] != NONE || WORTHLESS(0) || WORTHLESS(1) || WORTHLESS(2))
#endif

/* hopeless(), step by step. */
inline lookAround() {
  hopeless = (abortState[me] != NONE);
  q = 0;
  do
  :: q < N && !hopeless ->
    if
    :: q == me -> skip
    :: else ->
      arrived = (published[q] > next);
      if
      :: arrived && q != awaited -> skip
      :: else ->
        if
        :: GONE(q) ->
          /* It may have arrived between the two looks. */
          if
          :: q != awaited && published[q] > next -> skip
          :: else -> hopeless = 1; cause = 10 + q
          fi
        :: else
        fi
      fi
    fi;
    q++
  :: else -> break
  od;
  q = 0;
  arrived = 0
}

/* waitOn */
inline waitOn(kind, p, target) {
  awaited = p;
  do
  :: WORD(kind, p) >= target -> break
  :: else ->
    lookAround();
    if
    :: hopeless ->
#ifdef M_NO_LAST_LOOK
      goto raise
#else
      if
      :: WORD(kind, p) >= target -> hopeless = 0; cause = 0; break
      :: else -> goto raise
      fi
#endif
    :: else
    fi;
#ifndef M_NOT_ANNOUNCED
    waiters[p]++;
#endif
    seen = WORD(kind, p);
    if
    :: seen < target ->
      /* The kernel compares and enqueues as one. */
#ifdef M_KERNEL_COMPARES_NOT
      sleepsOn[me] = NAME(kind, p);
#else
      atomic {
        if
        :: WORD(kind, p) == seen -> sleepsOn[me] = NAME(kind, p)
        :: else
        fi
      }
#endif
      (sleepsOn[me] == 0 || HOPELESS);
      sleepsOn[me] = 0
    :: else
    fi;
#ifndef M_NOT_ANNOUNCED
    waiters[p]--;
#endif
    seen = 0
  od;
  awaited = N
}

/* record(): whoever comes first claims, writes, sets; who finds a cause goes on with that one. The
 * code waits a while for a writer that lives, which here always comes to its end. */
inline record(p) {
  claimed = 0;
#ifdef M_ABORT_OVERWRITES
  claimed = 1;
  abortState[p] = WRITING;
#else
  atomic {
    if
    :: abortState[p] == NONE -> abortState[p] = WRITING; writer[p] = me; claimed = 1
    :: abortState[p] == WRITING && dead[writer[p]] ->
      writer[p] = me;
      firstCause[p] = 0;
      claimed = 1
    :: abortState[p] == SET -> cause = abortCause[p]
    fi
  }
#endif
  if
  :: claimed ->
    d_step {
      abortCause[p] = cause;
      if
      :: firstCause[p] == 0 -> firstCause[p] = cause
      :: else
      fi
    };
    abortState[p] = SET;
    told = 1
  :: else
  fi
}

/* recordOnAll(): all records in the order of ranks, one's own among them, then the sleepers. */
inline recordOnAll() {
  told = 0;
#ifdef M_OWN_RECORD_FIRST
  record(me);
#endif
  for (q : 0 .. N - 1) {
    if
    :: q == me || !left[q] -> record(q)
    :: else
    fi
  };
  claimed = 0;
  q = 0;
  do
  :: q < N && told ->
    wake(2, q);
    wake(3, q);
    wake(PUBLISHED, q);
    wake(CONSUMED, q);
    q++
  :: else -> break
  od;
  told = 0;
  q = 0
}

/* passOn(), with what recorded() finds: the writer may have died between claim and text. */
inline passOn() {
  (abortState[me] == SET || dead[writer[me]]);
  if
  :: abortState[me] == SET -> cause = abortCause[me]
  :: else -> cause = 99
  fi;
  recordOnAll()
}

/* awaitConsumed(), and the results of segment i. */
inline copyResults(i) {
  for (p : 0 .. N - 1) {
    if
    :: p != me ->
#ifndef M_COPIES_UNCONSUMED
      waitOn(CONSUMED, p, i + 1);
#endif
      bad = bad || (PART(me, p, i) != i + 1)
    :: else
    fi
  }
}

proctype Rank(byte me) {
  byte i, c, p, q, w, next, awaited = N, seen, sleepers, cause, read;
  bool hopeless, arrived, claimed, told, bad, raised, all;
  {
    do
    :: c < COLLECTIVES ->
      /* begin() */
      if
      :: abortState[me] != NONE -> goto raise
      :: else
      fi;
      arrival[me * 2 + LINE(c)] = SIGNATURE(me, c);
      do
      :: i < (c + 1) * SEGMENTS ->
        /* acquire(): every peer has finished with what lies there. */
#ifndef M_REUSES_UNREAD
        for (p : 0 .. N - 1) {
          if
          :: p != me && i + 1 > RING -> waitOn(CONSUMED, p, i + 1 - RING)
          :: else
          fi
        };
#endif
#ifdef M_PUBLISHES_BEFORE_WRITE
        publish(i);
#endif
        ring[me * RING + i % RING] = HALF;
#if BACK
        d_step {
          for (p : 0 .. N - 1) { PART(me, p, i) = HALF }
        };
#endif
        ring[me * RING + i % RING] = i + 1;
#ifndef M_PUBLISHES_BEFORE_WRITE
        publish(i);
#endif
#ifdef M_CONSUMES_BEFORE_READ
        publishWord(CONSUMED, me, i + 1);
#endif
        /* await(): the first of a collective compares the signatures. */
        for (p : 0 .. N - 1) {
          if
          :: p != me ->
            if
            :: i == next -> waitOn(ARRIVED(c), p, i + 1)
            :: else -> waitOn(PUBLISHED, p, i + 1)
            fi;
#ifndef M_COMPARES_NOT
            if
            :: i == next ->
              read = arrival[p * 2 + LINE(c)];
              if
              :: read != SIGNATURE(me, c) ->
                assert(DIFFERS || abortState[me] != NONE);
                cause = 20 + p;
                goto raise
              :: else
              fi;
              read = 0
            :: else
            fi;
#endif
            /* The content, twice: a reader takes its time. */
            bad = bad || (ring[p * RING + i % RING] != i + 1);
            bad = bad || (ring[p * RING + i % RING] != i + 1);
            /* A short message lies in the arrival's line, behind the hash of the signature. */
            bad = bad || (i == next && !DIFFERS && arrival[p * 2 + LINE(c)] != SIGNATURE(me, c))
#if BACK
            ;
            d_step {
              assert(ring[p * RING + i % RING] != FREED);
              PART(p, me, i) = i + 1
            }
#endif
          :: else
          fi
        };
#ifndef M_CONSUMES_BEFORE_READ
        publishWord(CONSUMED, me, i + 1);
#endif
#if BACK
        if
        :: i > next -> copyResults(i - 1)
        :: else
        fi;
#endif
        i++
      :: else -> break
      od;
#if BACK
      copyResults(i - 1);
#endif
      /* end(): what was read counts only if nothing had failed by then. */
      next = i;
      if
      :: abortState[me] != NONE -> goto raise
      :: else
      fi;
      assert(!bad);
      assert(!(DIFFERS && c == 1));
      c++
    :: else -> break
    od;
    goto close;

  raise:
    raised = 1;
    assert(DIFFERS || MORTAL);
    /* fail() or raise(): all are told first, then what the record says is thrown. */
    if
    :: abortState[me] == NONE -> recordOnAll()
#ifdef M_TELLS_NOBODY_ON
    :: abortState[me] == SET
#else
    :: abortState[me] != NONE -> passOn()
#endif
    fi;
    d_step {
      assert(abortState[me] == SET && abortCause[me] == firstCause[me]);
      if
      :: raisedCause == 0 -> raisedCause = abortCause[me]
      :: else -> assert(abortCause[me] == raisedCause)
      fi
    };

  close:
    /* close() */
#ifndef M_TELLS_NOBODY_ON
    if
    :: abortState[me] != NONE -> passOn()
    :: else
    fi;
#endif
    /* After a fault who only reads will throw away what it has read. */
#ifdef M_FREES_UNDER_WRITERS
#define HARMLESS (abortState[me] != NONE)
#else
#define HARMLESS (!BACK && abortState[me] != NONE)
#endif
    all = 1;
    for (p : 0 .. N - 1) {
      if
      :: p == me || HARMLESS || GONE(p) || consumed[p] >= published[me] -> skip
      :: else ->
        /* It waits a little; then the memory stays. */
        if
        :: p == me || HARMLESS || GONE(p) || consumed[p] >= published[me]
        :: all = 0
        fi
      fi
    };
    left[me] = 1;
    wake(2, me);
    wake(3, me);
    wake(PUBLISHED, me);
    wake(CONSUMED, me);
    if
    :: all ->
      for (p : 0 .. RING - 1) { ring[me * RING + p] = FREED }
    :: else
    fi
  } unless { dead[me] }
}

init {
  byte r;
  atomic {
    for (r : 0 .. N - 1) { run Rank(r) }
  };
#ifdef DEATH
  /* At any step of rank 1, or never. */
  if
  :: dead[1] = 1
  :: skip
  fi
#endif
}
