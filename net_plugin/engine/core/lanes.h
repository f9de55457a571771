/* How many of a path's bulk lanes carry. Pure.
 *
 * Every lane is a stream of its own that fills the queue before a narrow port on its own. Several
 * senders may meet at one: a node that has lost NICs, or a tree's inner node. Their streams divide
 * the port's queue among them. With many streams each has less than a segment or two there. What
 * such a stream loses is found by a time-out only, since no later acknowledgement shows it. NCCL
 * waits for that one chunk meanwhile. Where the links are wide and nothing is lost more streams
 * mean more cores at work. So: all lanes until segments are sent again, then half as many, down to
 * one; one more again after a time without losses, which doubles whenever an additional lane was
 * answered by losses.
 *
 * Units: nanoseconds. Plain struct, nothing to free. The caller serialises access. No function
 * fails.
 */
#ifndef R2_ENGINE_CORE_LANES_H
#define R2_ENGINE_CORE_LANES_H

#include <stdbool.h>
#include <stdint.h>

#define R2_LANES_WINDOW UINT64_C(200000000) /* a sample's least time */
#define R2_LANES_SEGMENTS 100u              /* and segments: fewer say nothing */
#define R2_LANES_PPM 3000u                  /* sent again, of a million: too many streams */
#define R2_LANES_LEAST 4u                   /* and so many: a few may be a timer's mistake */
#define R2_LANES_WAIT UINT64_C(10000000000) /* without losses, before one more is tried */
#define R2_LANES_WAIT_MOST UINT64_C(640000000000)

struct r2_lanes {
    unsigned most, now;                    /* planned; in use */
    uint64_t from, sent_from, resent_from; /* of the sample; from 0: none */
    uint64_t calm;                         /* time of samples without losses */
    uint64_t wait;                         /* calm that it takes */
    bool more;                             /* the last change was one more */
};

/* A path has come up with `most` lanes (0: as one). */
void r2_lanes_init(struct r2_lanes *l, unsigned most);
/* Segments of data sent and sent again since the path came up, over all its lanes. Whether l->now
 * has changed. Only time with traffic counts. */
bool r2_lanes_sample(struct r2_lanes *l, uint64_t sent, uint64_t resent, uint64_t now);

#endif
