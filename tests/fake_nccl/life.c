// Exported functions: life of communicators, and calls that this library lacks.
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_nccl.h"

/// Whether a call may use the communicator. As in NCCL, calls after an asynchronous error return
/// that error.
Status alive(const Comm* comm, const char* name) {
  if (!comm) return error(INVALID_ARGUMENT, "%s: the communicator is NULL", name);
  if (comm->magic != MAGIC)
    return error(INVALID_ARGUMENT, "%s: the communicator is destroyed", name);
  if (atomic_load(&comm->polls) > 0)
    return error(INVALID_ARGUMENT, "%s: the call before is in progress", name);
  const int status = atomic_load(&((Comm*)comm)->async_error);
  return status ? error((Status)status, "%s: the communicator has an asynchronous error", name)
                : OK;
}

EXPORT Status ncclGetVersion(int* version) {
  const char* text = getenv("FAKE_NCCL_VERSION");
  *version = text ? atoi(text) : 22907;
  return OK;
}

EXPORT const char* ncclGetErrorString(int status) {
  static const char* const texts[] = {"no error",       "CUDA failed",  "a system call failed",
                                      "internal error", "bad argument", "bad usage",
                                      "a peer failed",  "in progress",  "timed out"};
  return status < 0 || status > TIMED_OUT ? "unknown status" : texts[status];
}

EXPORT Status ncclGetUniqueId(UniqueId* id) {
  record("getUniqueId", NULL, NULL, 0, -1, -1, -1);
  const Fault struck = fault("getUniqueId");
  return struck.status != OK ? struck.status : new_id(id);
}

static _Atomic int numbers;

static const uint64_t MIB = 1 << 20;

static Comm* new_comm(int size, int rank, int device) {
  Comm* comm = calloc(1, sizeof *comm);
  if (!comm) abort();
  comm->magic = MAGIC;
  comm->size = size;
  comm->rank = rank;
  comm->device = device;
  comm->number = atomic_fetch_add(&numbers, 1);
  return comm;
}

/// ncclConfig_t of NCCL 2.28.
typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
  const char* net_name;
  int split_share, traffic_class;
  const char* comm_name;
  int collnet_enable, cta_policy, shrink_share, nvls_ctas, channels_per_net_peer,
      nvlink_centric_sched;
} Config;

/// Whether parts are of a communicator's family. NCCL's variable wins; a part without a config has
/// its parent's.
static bool shares(const Config* config, const Comm* parent) {
  const char* given = getenv("NCCL_COMM_SPLIT_SHARE_RESOURCES");
  if (given != NULL) return atoi(given) == 1;
  if (config == NULL) return parent != NULL && parent->shares;
  return config->size > offsetof(Config, split_share) && config->split_share == 1;
}

/// Like NCCL, it returns the communicator's handle before it waits for the other ranks.
static Status create(Comm** out, int size, const UniqueId* id, int rank, const Comm* parent,
                     const Config* config, const char* name) {
  if (!out || size < 1 || size > MAX_RANKS || rank < 0 || rank >= size) {
    return error(INVALID_ARGUMENT, "%s: rank %d of %d (at most %d)", name, rank, size, MAX_RANKS);
  }
  Comm* comm = new_comm(size, rank, parent ? parent->device : 0);
  comm->parent = parent;
  comm->shares = shares(config, parent);
  comm->family = parent && parent->shares ? parent->family : calloc(1, sizeof *comm->family);
  if (!comm->family) abort();
  atomic_fetch_add(&comm->family->bytes, parent && parent->shares ? MIB : 512 * MIB);
  record(name, comm, NULL, 0, -1, -1, rank);
  const Fault struck = fault(name);
  atomic_fetch_add(&comm->calls, 1);
  atomic_store(&comm->polls, struck.polls);
  *(Comm* volatile*)out = comm;
  Status status = struck.status;
  if (status == OK && struck.hang) status = hang(comm, name);
  if (status == OK) status = join(comm, id);
  if (status != OK) {
    forget_own_id(id);
    *(Comm* volatile*)out = NULL;
    comm->magic = 0;
  }
  atomic_fetch_sub(&comm->calls, 1);
  return status == OK && struck.polls ? IN_PROGRESS : status;
}

/// Records the fields that are set: first numbers, as counts, then texts, in the name. Reads only
/// the caller's size.
static Status read_config(const Config* given) {
  if (given == NULL) return OK;
  if (given->magic != 0xcafebeef || given->version < 21400) {
    return error(INVALID_ARGUMENT, "config of magic %x, version %u", given->magic, given->version);
  }
  Config known = {.net_name = NULL};
  for (size_t at = offsetof(Config, blocking); at < sizeof known; at += sizeof(int)) {
    if (at >= offsetof(Config, net_name) && at < offsetof(Config, split_share)) continue;
    if (at >= offsetof(Config, comm_name) && at < offsetof(Config, collnet_enable)) continue;
    memcpy((char*)&known + at, &(int){INT_MIN}, sizeof(int));
  }
  memcpy(&known, given, given->size < sizeof known ? given->size : sizeof known);
  const Config* config = &known;
  const struct {
    const char* name;
    int value;
  } numbers[] = {{"blocking", config->blocking},
                 {"cgaClusterSize", config->cga_cluster_size},
                 {"minCTAs", config->min_ctas},
                 {"maxCTAs", config->max_ctas},
                 {"splitShare", config->split_share},
                 {"trafficClass", config->traffic_class},
                 {"collnetEnable", config->collnet_enable},
                 {"CTAPolicy", config->cta_policy},
                 {"shrinkShare", config->shrink_share},
                 {"nvlsCTAs", config->nvls_ctas},
                 {"nChannelsPerNetPeer", config->channels_per_net_peer},
                 {"nvlinkCentricSched", config->nvlink_centric_sched}};
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; ++i) {
    if (numbers[i].value == INT_MIN) continue;
    if (numbers[i].value < 0) {
      return error(INVALID_ARGUMENT, "config: %s %d", numbers[i].name, numbers[i].value);
    }
    char name[64];
    snprintf(name, sizeof name, "config.%s", numbers[i].name);
    record(name, NULL, NULL, (uint64_t)numbers[i].value, -1, -1, -1);
  }
  const char* texts[] = {config->net_name, config->comm_name};
  for (int i = 0; i < 2; ++i) {
    char name[64];
    if (texts[i] == NULL) continue;
    snprintf(name, sizeof name, "config.%s:%s", i == 0 ? "netName" : "commName", texts[i]);
    record(name, NULL, NULL, 0, -1, -1, -1);
  }
  return OK;
}

EXPORT Status ncclCommInitRankConfig(Comm** comm, int size, UniqueId id, int rank,
                                     const Config* config) {
  const Status status = read_config(config);
  return status != OK ? status : create(comm, size, &id, rank, NULL, config, "initRank");
}

EXPORT Status ncclCommInitRank(Comm** comm, int size, UniqueId id, int rank) {
  return create(comm, size, &id, rank, NULL, NULL, "initRank");
}

typedef struct {
  int color, key;
  UniqueId id;
} Choice;

static Status split(Comm* parent, int color, int key, Comm** out, const Config* config) {
  Line* lines = parent->shared->lines;
  Choice* own = (Choice*)lines[parent->rank].data;
  own->color = color;
  own->key = key;
  Status status = barrier(parent);
  int size = 0, rank = 0, leader = -1;
  for (int i = 0; i < parent->size; ++i) {
    const Choice* other = (const Choice*)lines[i].data;
    if (other->color != color) continue;
    ++size;
    if (other->key < key || (other->key == key && i < parent->rank)) ++rank;
    if (leader < 0 || other->key < ((const Choice*)lines[leader].data)->key) leader = i;
  }
  if (status == OK && color >= 0 && rank == 0) status = new_id(&own->id);
  if (status == OK) status = barrier(parent);
  UniqueId id = {{0}};
  if (color >= 0) id = ((const Choice*)lines[leader].data)->id;
  if (status == OK) status = barrier(parent);
  return status != OK || color < 0 ? status
                                   : create(out, size, &id, rank, parent, config, "splitInit");
}

/// Like NCCL with nonblocking communicators: the caller's pointer stays NULL until the parent, not
/// the part, is no longer in progress. The call itself returns success for an even number of polls,
/// else "in progress".
static Status split_later(Comm* parent, Comm** out, int polls) {
  parent->part = *out;
  parent->part_at = out;
  *(Comm* volatile*)out = NULL;
  atomic_store(&parent->polls, polls);
  return polls % 2 ? IN_PROGRESS : OK;
}

EXPORT Status ncclCommSplit(Comm* comm, int color, int key, Comm** out, const Config* config) {
  *out = NULL;
  const Status known = read_config(config);
  if (known != OK) return known;
  record("split", comm, NULL, 0, -1, color, key);
  Status status = alive(comm, "split");
  if (status != OK) return status;
  const Fault struck = fault("split");
  atomic_fetch_add(&comm->calls, 1);
  status = struck.hang           ? hang(comm, "split")
           : struck.status != OK ? struck.status
                                 : split(comm, color, key, out, config);
  atomic_fetch_sub(&comm->calls, 1);
  return status == OK && struck.polls ? split_later(comm, out, struck.polls) : status;
}

/// Ends the communicator once no thread is in a call on it.
static void end(Comm* comm) {
  for (unsigned turn = 0; atomic_load(&comm->calls) > 0; ++turn) rest(turn);
  comm->magic = 0;
  leave(comm);
}

static Status finish(Comm* comm, const char* name) {
  record(name, comm, NULL, 0, -1, -1, -1);
  if (!comm) return OK;
  if (comm->magic != MAGIC)
    return error(INVALID_ARGUMENT, "%s: the communicator is destroyed already", name);
  const Fault struck = fault(name);
  return struck.status != OK ? struck.status : struck.hang ? hang(comm, name) : OK;
}

EXPORT Status ncclCommFinalize(Comm* comm) {
  return finish(comm, "finalize");
}

EXPORT Status ncclCommDestroy(Comm* comm) {
  const Status status = finish(comm, "destroy");
  if (status == OK && comm) end(comm);
  return status;
}

/// An injected hang of abort lasts forever, because only an abort ends other hangs.
EXPORT Status ncclCommAbort(Comm* comm) {
  record("abort", comm, NULL, 0, -1, -1, -1);
  if (!comm) return OK;
  if (comm->magic != MAGIC)
    return error(INVALID_ARGUMENT, "abort: the communicator is destroyed already");
  const Fault struck = fault("abort");
  while (struck.hang) rest(100);
  if (struck.status != OK) return struck.status;
  atomic_store(&comm->family->aborted, 1);
  end(comm);
  return OK;
}

EXPORT Status ncclCommGetAsyncError(Comm* comm, int* status) {
  if (!comm || comm->magic != MAGIC)
    return error(INVALID_ARGUMENT, "getAsyncError: no living communicator");
  const bool joining = !comm->shared || atomic_load(&comm->shared->here) == 0;
  const bool busy = joining || atomic_load(&comm->polls) > 0;
  if (!joining && busy && atomic_fetch_sub(&comm->polls, 1) == 1 && comm->part_at != NULL) {
    *(Comm* volatile*)comm->part_at = comm->part;
    comm->part_at = NULL;
  }
  *status = busy ? IN_PROGRESS : atomic_load(&comm->async_error);
  const Fault struck = fault("getAsyncError");
  return struck.status;
}

EXPORT Status ncclCommCount(const Comm* comm, int* count) {
  const Status status = alive(comm, "count");
  if (status == OK) *count = comm->size;
  return status;
}

EXPORT Status ncclCommUserRank(const Comm* comm, int* rank) {
  const Status status = alive(comm, "userRank");
  if (status == OK) *rank = comm->rank;
  return status;
}

EXPORT Status ncclCommCuDevice(const Comm* comm, int* device) {
  const Status status = alive(comm, "cuDevice");
  if (status == OK) *device = comm->device;
  return status;
}

EXPORT Status ncclRedOpCreatePreMulSum(int* op, const void* scalar, int type, int residence,
                                       Comm* comm) {
  record("redOpCreatePreMulSum", comm, NULL, 0, type, -1, residence);
  const Status status = alive(comm, "redOpCreatePreMulSum");
  if (status != OK) return status;
  if (!scalar || !type_bytes(type))
    return error(INVALID_ARGUMENT, "redOpCreatePreMulSum: type %d", type);
  for (int i = 0; i < MAX_OPS; ++i) {
    if (comm->factors[i].used) continue;
    comm->factors[i] =
        (Factor){true, residence == 0, type, residence == 0 ? 1 : load(type, scalar), scalar};
    *op = BUILT_IN_OPS + i;
    return OK;
  }
  return error(INTERNAL_ERROR, "redOpCreatePreMulSum: %d operations are not destroyed", MAX_OPS);
}

EXPORT Status ncclRedOpDestroy(int op, Comm* comm) {
  record("redOpDestroy", comm, NULL, 0, -1, op, -1);
  const int i = op - BUILT_IN_OPS;
  if (!comm || i < 0 || i >= MAX_OPS || !comm->factors[i].used) {
    return error(INVALID_ARGUMENT, "redOpDestroy: unknown operation %d", op);
  }
  comm->factors[i].used = false;
  return OK;
}

#define MISSING(Name)                                             \
  EXPORT Status Name(void) {                                      \
    return error(INVALID_USAGE, "the stand-in has no %s", #Name); \
  }
MISSING(ncclCommInitAll)
MISSING(ncclWinGetUserPtr)
MISSING(ncclDevCommCreate)
MISSING(ncclDevCommDestroy)
MISSING(ncclCommShrink)
MISSING(ncclCommGrow)
MISSING(ncclCommRevoke)
MISSING(ncclCommGetUniqueId)
MISSING(ncclCommInitRankScalable)
MISSING(ncclCommSuspend)
MISSING(ncclCommResume)
MISSING(ncclAlltoAll)
MISSING(ncclGather)
MISSING(ncclScatter)
MISSING(ncclGroupSimulateEnd)
// Functions of NCCL 2.29 and 2.30: torch 2.14 and 2.15 look them up at import, or may do so next.
MISSING(ncclCommQueryProperties)
MISSING(ncclGetLsaDevicePointer)
MISSING(ncclGetLsaMultimemDevicePointer)
MISSING(ncclGetMultimemDevicePointer)
MISSING(ncclGetPeerDevicePointer)
MISSING(ncclPutSignal)
MISSING(ncclSignal)
MISSING(ncclWaitSignal)
