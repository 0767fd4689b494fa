// A stand-in for NCCL that works on host memory, between processes or threads of one machine.
//
// It has NCCL's names and binary interface, so CuPy calls it like NCCL. If the ranks disagree, it
// returns an error where NCCL would hang or compute nonsense. Its speed does not matter.
//
//   arithmetic.c  element types and reductions
//   shared.c      the memory that ranks share; waiting in it
//   faults.c      injected faults, the record of all calls, the text of the last error
//   execute.c     executing one operation, or the operations of a group
//   calls.c       exported: data movement and groups
//   life.c        exported: life of communicators
//   memory.c      exported: memory, and registrations
#pragma once

#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

enum { MAX_RANKS = 8, MAX_OPS = 128, CHUNK = 64 << 10, ID_BYTES = 128 };

typedef enum {
  OK = 0,
  CUDA_ERROR = 1,
  SYSTEM_ERROR = 2,
  INTERNAL_ERROR = 3,
  INVALID_ARGUMENT = 4,
  INVALID_USAGE = 5,
  REMOTE_ERROR = 6,
  IN_PROGRESS = 7,
  TIMED_OUT = 8,
} Status;

typedef enum {
  INT8,
  UINT8,
  INT32,
  UINT32,
  INT64,
  UINT64,
  HALF,
  FLOAT,
  DOUBLE,
  BFLOAT16,
  E4M3,
  E5M2,
  TYPES
} Type;

typedef enum { SUM, PROD, MAX, MIN, AVG, BUILT_IN_OPS, PREMUL = BUILT_IN_OPS } Op;

typedef enum { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECV, KINDS } Kind;

typedef struct {
  char internal[ID_BYTES];
} UniqueId;

/// A rank's call; all fields but the factor must be equal on all ranks.
typedef struct {
  int kind, type, op, root;
  uint64_t count;
  double factor;
} Signature;

/// One rank's part of the shared memory.
typedef struct {
  alignas(64) _Atomic uint64_t step;  // barriers that the rank has reached
  _Atomic int present;
  char host[64];  // NCCL_HOSTID
  Signature signature;
  alignas(64) unsigned char data[CHUNK];
} Line;

/// Messages from one rank to another, one chunk at a time.
typedef struct {
  alignas(64) _Atomic uint64_t written, read;  // chunks
  _Atomic int refused;                         // the receiver expected something else
  uint64_t count, bytes;
  int type;
  alignas(64) unsigned char data[CHUNK];
} Channel;

typedef struct {
  _Atomic int size, here;
  Line lines[MAX_RANKS];
  Channel channels[MAX_RANKS][MAX_RANKS];  // [from][to]
} Shared;

/// A reduction with a factor, as ncclRedOpCreatePreMulSum makes it.
typedef struct {
  bool used, on_device;
  int type;
  double factor;
  const void* address;
} Factor;

/// What communicators share by splitShare: never freed, as they are not.
typedef struct {
  _Atomic int aborted;  // ends the calls of all
  _Atomic int busy;     // threads in calls: NCCL allows one
  _Atomic uint64_t bytes;
} Family;

typedef struct Comm {
  uint64_t magic;  // MAGIC while it lives; never freed, so use after the end is detected
  int rank, size, device, number;
  const struct Comm* parent;  // of a split; its abort ends the split's init
  Shared* shared;
  uint64_t step;
  bool shares;  // its parts are of its family
  Family* family;
  _Atomic int calls, async_error, polls;
  struct Comm *part, **part_at;  // of a split in progress: written to part_at when polls is 0
  Factor factors[MAX_OPS];
} Comm;

#define MAGIC 0x66616b656e63636cull

/// An operation that waits for its group to end.
typedef struct {
  Comm* comm;
  Kind kind;
  const unsigned char* send;
  unsigned char* recv;
  uint64_t count;
  int type, op, root;
  bool hang;
  int polls;               // so many polls return ncclInProgress after it
  uint64_t chunk, offset;  // of a send or recv in progress
  bool done;
} Operation;

// arithmetic.c
size_t type_bytes(int type);
double load(int type, const void* address);
void reduce(void* out, int ranks, const void* const inputs[], const double factors[], size_t count,
            int type, int op);

// shared.c
Status new_id(UniqueId* id);
void forget_id(const UniqueId* id);
void forget_own_id(const UniqueId* id);
Status join(Comm* comm, const UniqueId* id);
void leave(Comm* comm);
Status barrier(Comm* comm);
void rest(unsigned turn);
Status hang(Comm* comm, const char* name);
void release(void);

// faults.c
typedef struct {
  Status status;  // if not OK, the call returns it and does nothing
  bool hang, skip;
  int polls;
} Fault;
Fault fault(const char* name);
Status error(Status status, const char* format, ...) __attribute__((format(printf, 2, 3)));
void record(const char* name, const Comm* comm, const void* stream, uint64_t count, int type,
            int op, int root);
void count_call(Comm* comm);

bool is_aborted(const Comm* comm);

// execute.c
Status execute(Operation* operations, size_t count);

// life.c
extern const char* const kind_names[KINDS];
Status alive(const Comm* comm, const char* name);
