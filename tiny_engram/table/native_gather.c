/* Rows of a table in host memory gathered by a pool of threads. native_gather.py builds, loads and describes it.

   Random rows cost the latency of memory, not its bandwidth, so each thread asks for the cache lines of rows to come while it
   copies. A job is cut into chunks, which the owner waits for in order, and those into blocks, which threads take in order; the
   owner works too while it waits. Output is a ring of `bays` chunks: none is written before the owner releases its bay. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

enum { LINE = 64, BLOCK = 128, SPIN_US = 100, ALERT_US = 1000, WOKEN = 4 };
enum { TOOK, LATER, NONE_LEFT };

typedef struct {
    const uint8_t *payload, *scale;
    int64_t payload_stride, payload_bytes, scale_stride, scale_bytes, rows;
    const int64_t *ids;
    int64_t count;
    uint8_t *out;
    int64_t chunk_rows, bays, ahead, far;
} te_job;

typedef struct {
    te_job job; /* written while no thread is `active` */
    int64_t per_chunk, blocks, room;
    _Atomic int64_t *done; /* rows gathered of each chunk */
    _Alignas(LINE) _Atomic int64_t next;
    _Alignas(LINE) _Atomic int64_t limit; /* chunks before it may be written */
    _Atomic int64_t bad;                  /* place of the first id outside the table, or count */
    _Alignas(LINE) _Atomic int64_t turn;  /* odd while a job is open */
    _Atomic int64_t alert;                /* until then a job is about to come: do not sleep */
    _Atomic int stop;
    _Alignas(LINE) _Atomic int64_t active;
    _Alignas(LINE) pthread_mutex_t lock;
    pthread_cond_t wake;
    int workers;
    pthread_t threads[256];
} te_pool;

static void relax(unsigned *spins) {
    if (++*spins % 256 == 0) sched_yield(); /* where there are more threads than cores */
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static inline void fetch(const uint8_t *from, int64_t bytes, int64_t far) {
    for (uintptr_t line = (uintptr_t)from & -(uintptr_t)LINE; line < (uintptr_t)from + (uintptr_t)bytes; line += LINE)
        if (far) __builtin_prefetch((const void *)line, 0, 2); /* into the second cache, whose queue of misses is longer */
        else __builtin_prefetch((const void *)line, 0, 3);
}

static void gather(te_pool *p, int64_t first, int64_t count, uint8_t *out) {
    const te_job *j = &p->job;
    int64_t ids[BLOCK], width = j->payload_bytes + j->scale_bytes;
    memcpy(ids, j->ids + first, (size_t)count * sizeof *ids); /* what is checked is what is read */
    for (int64_t i = 0; i < count; i++) {
        if ((uint64_t)ids[i] < (uint64_t)j->rows) continue;
        int64_t known = atomic_load(&p->bad);
        while (first + i < known && !atomic_compare_exchange_weak(&p->bad, &known, first + i)) {}
        return;
    }
    for (int64_t i = 0; i < count + j->ahead; i++) {
        if (i < count) {
            fetch(j->payload + ids[i] * j->payload_stride, j->payload_bytes, j->far);
            if (j->scale_bytes) fetch(j->scale + ids[i] * j->scale_stride, j->scale_bytes, j->far);
        }
        int64_t row = i - j->ahead;
        if (row < 0) continue;
        uint8_t *to = out + row * width;
        memcpy(to, j->payload + ids[row] * j->payload_stride, (size_t)j->payload_bytes);
        if (j->scale_bytes) memcpy(to + j->payload_bytes, j->scale + ids[row] * j->scale_stride, (size_t)j->scale_bytes);
    }
}

static int work(te_pool *p) {
    const te_job *j = &p->job;
    int64_t at = atomic_load(&p->next), chunk;
    do {
        chunk = at / p->per_chunk;
        if (at >= p->blocks) return NONE_LEFT;
        if (chunk >= atomic_load(&p->limit)) return LATER;
    } while (!atomic_compare_exchange_weak(&p->next, &at, at + 1));
    int64_t offset = at % p->per_chunk * BLOCK, first = chunk * j->chunk_rows + offset, count = j->chunk_rows - offset;
    if (count > BLOCK) count = BLOCK;
    if (count > j->count - first) count = j->count - first;
    if (count > 0) {
        gather(p, first, count, j->out + (chunk % j->bays * j->chunk_rows + offset) * (j->payload_bytes + j->scale_bytes));
        atomic_fetch_add(&p->done[chunk], count);
    }
    return TOOK;
}

static int called(te_pool *p, int64_t seen) {
    int64_t turn = atomic_load(&p->turn);
    return atomic_load(&p->stop) || (turn % 2 && turn != seen);
}

/* Each thread wakes some more: one that wakes all would do nothing else meanwhile. */
static void wake_some(te_pool *p) {
    for (int i = 0; i < WOKEN; i++) pthread_cond_signal(&p->wake);
}

static void *worker(void *pool) {
    te_pool *p = pool;
    for (int64_t seen = 0;;) {
        unsigned spins = 0;
        /* The next job often comes soon, and a sleeping thread takes as long to wake as a small job lasts. */
        for (int64_t end = now_us() + SPIN_US, now = 0; !called(p, seen) && (now < end || now < atomic_load(&p->alert)); now = now_us())
            relax(&spins);
        if (!called(p, seen)) {
            pthread_mutex_lock(&p->lock);
            while (!called(p, seen) && now_us() >= atomic_load(&p->alert)) pthread_cond_wait(&p->wake, &p->lock);
            pthread_mutex_unlock(&p->lock);
            wake_some(p);
            continue;
        }
        if (atomic_load(&p->stop)) return NULL;
        int64_t turn = atomic_load(&p->turn);
        atomic_fetch_add(&p->active, 1); /* from here to its end the job stays as it is, if it is still open */
        if (turn % 2 && atomic_load(&p->turn) == turn)
            for (int state; (state = work(p)) != NONE_LEFT;)
                if (state == LATER) relax(&spins);
        atomic_fetch_sub(&p->active, 1);
        seen = turn;
    }
}

void te_destroy(te_pool *p) {
    pthread_mutex_lock(&p->lock);
    atomic_store(&p->stop, 1);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->workers; i++) pthread_join(p->threads[i], NULL);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
    free(p->done);
    free(p);
}

/* A pool that works with as many threads, the caller's among them; fewer where the system gives no more. NULL without memory. */
te_pool *te_create(int threads) {
    te_pool *p = aligned_alloc(LINE, (sizeof(te_pool) + LINE - 1) / LINE * LINE);
    if (!p) return NULL;
    memset(p, 0, sizeof *p);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    for (; p->workers < threads - 1 && p->workers < 256; p->workers++)
        if (pthread_create(&p->threads[p->workers], NULL, worker, p)) break;
    return p;
}

/* A job is about to come: threads get up for it. */
void te_alert(te_pool *p) {
    pthread_mutex_lock(&p->lock);
    atomic_store(&p->alert, now_us() + ALERT_US);
    pthread_mutex_unlock(&p->lock);
    wake_some(p);
}

/* Open a job; one at a time. 0, or -1 without memory. */
int te_start(te_pool *p, const te_job *job) {
    int64_t chunks = (job->count + job->chunk_rows - 1) / job->chunk_rows;
    if (chunks > p->room) {
        _Atomic int64_t *done = realloc((void *)p->done, (size_t)chunks * sizeof *done);
        if (!done) return -1;
        p->done = done, p->room = chunks;
    }
    for (int64_t i = 0; i < chunks; i++) atomic_init(&p->done[i], 0);
    p->job = *job;
    p->per_chunk = (job->chunk_rows + BLOCK - 1) / BLOCK;
    p->blocks = chunks * p->per_chunk;
    atomic_store(&p->next, 0);
    atomic_store(&p->limit, job->bays);
    atomic_store(&p->bad, job->count);
    pthread_mutex_lock(&p->lock);
    atomic_fetch_add(&p->turn, 1);
    pthread_mutex_unlock(&p->lock);
    wake_some(p);
    return 0;
}

/* Work until a chunk's rows are all there. 0, or -1 for a chunk whose bay was not released. */
int te_wait(te_pool *p, int64_t chunk) {
    int64_t first = chunk * p->job.chunk_rows, rows = p->job.count - first;
    if (chunk >= atomic_load(&p->limit)) return -1;
    if (rows > p->job.chunk_rows) rows = p->job.chunk_rows;
    for (unsigned spins = 0; atomic_load(&p->done[chunk]) < rows;)
        if (work(p) != TOOK) relax(&spins);
    return 0;
}

/* Chunks before `limit` may be written. */
void te_release(te_pool *p, int64_t limit) { atomic_store(&p->limit, limit); }

/* Close the job, finished or not: the place of the first bad id that was met, or the job's count. */
int64_t te_finish(te_pool *p) {
    unsigned spins = 0;
    atomic_store(&p->next, p->blocks);
    atomic_store(&p->alert, 0);
    atomic_fetch_add(&p->turn, 1);
    while (atomic_load(&p->active)) relax(&spins);
    return atomic_load(&p->bad);
}
