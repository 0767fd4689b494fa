// The memory that the ranks of a communicator share, and waiting in it.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "fake_nccl.h"

static const char folder_name[] = "fake-nccl-XXXXXX", file_name[] = "/ranks";

// The ids made here, and the process that made them, which removes the remaining files at its end.
enum { MAX_IDS = 64 };
static UniqueId made[MAX_IDS];
static _Atomic int made_count;
static pid_t maker;

__attribute__((destructor)) static void forget_all(void) {
  for (int i = 0; maker == getpid() && i < made_count && i < MAX_IDS; ++i) forget_id(&made[i]);
}

/// Makes an empty file in a private folder; its path is the id.
Status new_id(UniqueId* id) {
  const char* parents[] = {getenv("TMPDIR"), "/tmp", "/dev/shm"};
  for (size_t i = 0; i < sizeof parents / sizeof *parents; ++i) {
    if (!parents[i] || strlen(parents[i]) + sizeof folder_name + sizeof file_name > ID_BYTES)
      continue;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, ID_BYTES, "%s/%s", parents[i], folder_name);
    if (!mkdtemp(id->internal)) continue;
    strcat(id->internal, file_name);
    const int file = open(id->internal, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file >= 0) {
      close(file);
      if (maker != getpid()) made_count = 0;
      maker = getpid();
      made[atomic_fetch_add(&made_count, 1) % MAX_IDS] = *id;
      return OK;
    }
  }
  return error(SYSTEM_ERROR, "no folder for the memory of the ranks: %s", strerror(errno));
}

/// Removes file and folder; ranks that have mapped the file keep their mapping.
void forget_id(const UniqueId* id) {
  char path[ID_BYTES + 1] = {0};
  memcpy(path, id->internal, ID_BYTES);
  char* slash = strrchr(path, '/');
  if (!slash) return;
  unlink(path);
  *slash = 0;
  rmdir(path);
}

/// The same, but only in the process that made the id, because another rank may still join.
void forget_own_id(const UniqueId* id) {
  for (int i = 0; maker == getpid() && i < made_count && i < MAX_IDS; ++i) {
    if (!memcmp(&made[i], id, ID_BYTES)) forget_id(id);
  }
}

void rest(unsigned turn) {
  if (turn < 100) {
    sched_yield();
  } else {
    nanosleep(&(struct timespec){0, 50000}, NULL);
  }
}

static _Atomic int released;

/// Ends all hangs of this process after a test: a thread that is never aborted would use part of a
/// core in all later tests.
void release(void) {
  atomic_fetch_add(&released, 1);
}

bool is_aborted(const Comm* comm) {
  return atomic_load(&comm->family->aborted);
}

/// Waits until the communicator is aborted, or release() is called.
Status hang(Comm* comm, const char* name) {
  const int before = atomic_load(&released);
  while (!is_aborted(comm) && atomic_load(&released) == before) rest(100);
  return error(INTERNAL_ERROR, "%s was aborted", name);
}

static Status fail_to_join(Comm* comm, const UniqueId* id, Status status) {
  forget_id(id);
  leave(comm);
  return status;
}

static bool given_up(const Comm* comm) {
  return is_aborted(comm) || (comm->parent && is_aborted(comm->parent));
}

/// With FAKE_NCCL_ONE_GPU all ranks are on one GPU, and NCCL refuses two of a host.
static Status own_gpu(const Comm* comm) {
  if (getenv("FAKE_NCCL_ONE_GPU") == NULL) return OK;
  const Line* lines = comm->shared->lines;
  for (int rank = 0; rank < comm->size; ++rank) {
    if (rank == comm->rank || strcmp(lines[rank].host, lines[comm->rank].host) != 0) continue;
    return error(INVALID_USAGE,
                 "Duplicate GPU detected : rank %d and rank %d both on CUDA device 0", comm->rank,
                 rank);
  }
  return OK;
}

/// Maps the memory that the id names and waits for all ranks.
Status join(Comm* comm, const UniqueId* id) {
  if (id->internal[0] != '/' || !memchr(id->internal, 0, ID_BYTES)) {
    return error(INVALID_ARGUMENT, "these bytes are no unique id");
  }
  const int file = open(id->internal, O_RDWR | O_CLOEXEC);
  if (file < 0)
    return error(SYSTEM_ERROR, "the unique id is stale: %s: %s", id->internal, strerror(errno));
  if (ftruncate(file, sizeof(Shared)) == 0) {
    void* memory = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    comm->shared = memory == MAP_FAILED ? NULL : memory;
  }
  close(file);
  if (!comm->shared) return error(SYSTEM_ERROR, "no memory for the ranks: %s", strerror(errno));
  int size = 0;
  if (!atomic_compare_exchange_strong(&comm->shared->size, &size, comm->size) &&
      size != comm->size) {
    return fail_to_join(comm, id,
                        error(INVALID_ARGUMENT, "rank %d says %d ranks, another one %d", comm->rank,
                              comm->size, size));
  }
  const char* host = getenv("NCCL_HOSTID");
  snprintf(comm->shared->lines[comm->rank].host, sizeof(comm->shared->lines[0].host), "%s",
           host != NULL ? host : "");
  if (atomic_exchange(&comm->shared->lines[comm->rank].present, 1)) {
    return fail_to_join(comm, id,
                        error(INVALID_USAGE, "two ranks say that they are rank %d", comm->rank));
  }
  if (atomic_fetch_add(&comm->shared->here, 1) + 1 == comm->size) forget_id(id);
  const int before = atomic_load(&released);
  for (unsigned turn = 0; atomic_load(&comm->shared->here) < comm->size; ++turn) {
    if (given_up(comm) || atomic_load(&released) != before) {
      return fail_to_join(comm, id,
                          error(INTERNAL_ERROR, "the init of rank %d was aborted", comm->rank));
    }
    rest(turn);
  }
  return own_gpu(comm);
}

void leave(Comm* comm) {
  if (comm->shared) munmap(comm->shared, sizeof(Shared));
  comm->shared = NULL;
}

/// Waits until all ranks have called it as often as this rank.
Status barrier(Comm* comm) {
  atomic_store(&comm->shared->lines[comm->rank].step, ++comm->step);
  for (int rank = 0; rank < comm->size; ++rank) {
    for (unsigned turn = 0; atomic_load(&comm->shared->lines[rank].step) < comm->step; ++turn) {
      if (is_aborted(comm)) return error(INTERNAL_ERROR, "rank %d was aborted", comm->rank);
      rest(turn);
    }
  }
  return OK;
}
