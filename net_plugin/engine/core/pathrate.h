/* Delivery rate and round trip of one path, and what follows from them: how many bytes may be
 * unacknowledged on the path and how long a chunk should be. Pure: times come in as arguments.
 *
 * The rate is the maximum of delivery-rate samples over about 10 round trips (at least 200 ms, at
 * most 800 ms of traffic); idle time does not age it. Samples taken while the sender had nothing to
 * send can raise it but not lower it, unless chunk after chunk takes twice what it should: then
 * they wait for a link that is slower than that. Only samples over half a megabyte or 20 ms count;
 * until there is one, shorter ones do. What a shaper or a switch saves up while the path is idle
 * (its burst) goes out at many times the rate that follows. Three chunks in a row end it at once if
 * each took more than four times what it should at that rate. One of them must have been sent after
 * another had come. So a path that falls to a tenth is known for that after two windows at most,
 * not when the maximum has aged. Where each window is sent at once, it takes three. A sample may
 * have pauses in it, a quarter of its time at most. The round trip is the minimum over 10 s; a path
 * that was never idle for 10 s is asked for clean samples: nothing goes out until all is
 * acknowledged, then one chunk, twice. The smaller of the two counts: the other may have waited for
 * a peer that was stopped.
 *
 * Units: bytes, nanoseconds, bytes per second. Ownership: a plain struct, nothing to free.
 * Threads: the caller serialises access. No function fails.
 */
#ifndef R2_ENGINE_CORE_PATHRATE_H
#define R2_ENGINE_CORE_PATHRATE_H

#include <stdbool.h>
#include <stdint.h>

#define R2_PATHRATE_BUCKETS 8
#define R2_CHUNK_MIN (64 * 1024)
#define R2_CHUNK_SLOW (16 * 1024) /* of a slow path: larger ones would hold messages back */

/* State of the path when a chunk was sent; travels in the ledger's in-flight record. */
struct r2_rate_stamp {
    uint64_t delivered;         /* bytes acknowledged on the path by the start of the sample */
    uint64_t at_send;           /* ... and by then */
    uint64_t delivered_time_ns; /* when that count last grew */
    uint64_t first_sent_ns;     /* when the oldest chunk of the current sample window was sent */
    bool app_limited;           /* the sender had run out of data */
    bool clean;                 /* nothing else was in flight: the round trip has no own queue */
};

/* Chunks that took too long since one came in time. */
struct r2_late {
    unsigned chunks;
    unsigned turns; /* of them sent after the one before had come */
    uint64_t at;    /* when the latest of those came */
    uint64_t mark;  /* the most that had been delivered when one of them was sent */
};

struct r2_pathrate {
    uint64_t delivered;
    uint64_t delivered_time_ns;
    uint64_t first_sent_ns;
    uint64_t inflight;
    struct {
        uint64_t delivered, time_ns, first_sent_ns;
        uint64_t idle_ns;       /* in it, with nothing in flight */
    } anchor;                   /* where samples begin */
    uint64_t app_limited_until; /* in units of `delivered`; 0: not limited */

    uint64_t bucket[R2_PATHRATE_BUCKETS]; /* maxima of consecutive spans of traffic time */
    unsigned bucket_now;
    uint64_t bucket_used_ns; /* traffic time spent in the current bucket */
    uint64_t last_sample_ns;
    struct r2_late far;    /* beyond four times what they should: the path has become slower */
    struct r2_late beyond; /* beyond twice: they wait for it, whoever else is limited */
    uint64_t valid_from;   /* in units of `delivered`: samples that begin before saw another path */

    uint64_t min_rtt_ns; /* 0: none yet */
    uint32_t min_rtt_len;
    uint64_t min_rtt_time_ns;
    uint64_t srtt_ns;
    uint64_t clean_rtt_ns; /* a clean one since the minimum is too old; 0: none */
    bool probing_rtt;

    bool known_slow; /* set by the caller: a path known to be slow, so its chunks are short */

    bool startup;
    uint64_t startup_window;
    uint64_t full_rate; /* highest rate a start-up round has reached */
    unsigned full_rounds;
    uint64_t round_end; /* in units of `delivered` */
};

void r2_pathrate_init(struct r2_pathrate *pr);
/* A new generation of the path: everything measured is forgotten, `known_slow` stays. */
void r2_pathrate_reset(struct r2_pathrate *pr);

/* A chunk of len bytes goes out; fills *stamp, which goes back in with the acknowledgement. */
void r2_pathrate_on_send(struct r2_pathrate *pr, uint64_t len, uint64_t now_ns,
                         struct r2_rate_stamp *stamp);
/* len bytes of a chunk sent at t_sent_ns have newly been acknowledged. */
void r2_pathrate_on_ack(struct r2_pathrate *pr, uint64_t len, const struct r2_rate_stamp *stamp,
                        uint64_t t_sent_ns, uint64_t now_ns);
/* The chunk's bytes came another way, after as long as they would not have needed here. */
void r2_pathrate_overtaken(struct r2_pathrate *pr, uint64_t len, const struct r2_rate_stamp *stamp,
                           uint64_t t_sent_ns, uint64_t now_ns);
/* len bytes in flight will never be acknowledged for this path (requeued). */
void r2_pathrate_on_lost(struct r2_pathrate *pr, uint64_t len);
/* The path has room but there is nothing to send. Call whenever a pull for this path came back
 * empty-handed while the window was open. */
void r2_pathrate_app_limited(struct r2_pathrate *pr);

/* The path is not what it was: what was measured of its rate is forgotten, bytes in flight are not.
 */
void r2_pathrate_forget(struct r2_pathrate *pr);

/* Measured rate, bytes per second; 0 before the first sample. */
uint64_t r2_pathrate_rate(const struct r2_pathrate *pr);
/* The same, but not more than the present silence allows: a path that should have acknowledged
 * long ago is slower than it was, and one whose first chunks are out for long is slow. */
uint64_t r2_pathrate_rate_now(const struct r2_pathrate *pr, uint64_t now_ns);
/* How long chunks take lately, or the present silence, whichever is longer. 0: none was sent. */
uint64_t r2_pathrate_srtt_now(const struct r2_pathrate *pr, uint64_t now_ns);
static inline uint64_t r2_pathrate_inflight(const struct r2_pathrate *pr)
{
    return pr->inflight;
}

/* The path may take another chunk while r2_pathrate_inflight() < this; 0 while it is to run empty
 * for a clean round trip. `chunk` is the length of the chunks sent now, `lanes` the number of bulk
 * lanes of the path (0 counts as 1). `any_nic`: any NIC may take the chunks. Then less is in
 * flight, since what one NIC has, another that runs empty cannot take (docs/decisions.md, 52). */
uint64_t r2_pathrate_window(const struct r2_pathrate *pr, uint64_t chunk, unsigned lanes,
                            bool any_nic);

/* Length that takes about a quarter of a millisecond at the measured rate. It is a multiple of
 * 4096, at least 64 KiB (16 KiB on a path known to be slow; or max_chunk, when that is smaller) and
 * at most max_chunk. */
uint32_t r2_pathrate_chunk_len(const struct r2_pathrate *pr, uint32_t max_chunk);

#endif
