/* What one process tells another about NICs, and whether the other has heard it: word about NICs of
 * its own (frame NIC), and verdicts about those of others (frame VERDICT). Both are repeated until
 * the other side says that it has heard them (frame HEARD).
 *
 * Word about a NIC is a state, not an event: its number is the NIC's epoch, what is repeated is
 * what holds by then, and who has heard an epoch need not hear an older one. A verdict is an event,
 * a hint that nobody has to get: each has a number of its own, and is said for HINT_NS at most.
 *
 * Units: nanoseconds. Everything here is under the peer's lock. */
#ifndef R2_ENGINE_PATH_NICNEWS_H
#define R2_ENGINE_PATH_NICNEWS_H

#define R2_HINTS 4

struct r2_path;

/* Part of a peer. */
struct r2_nicnews {
    uint32_t acked[R2_MAX_NICS]; /* by NIC of ours: the newest epoch that the peer has heard */
    uint64_t due, wait;          /* when what is open is said again; how long it waited for that */
    unsigned turn;               /* of the path that the next repetition takes */
    struct {
        struct r2_msg_verdict m;
        uint64_t until; /* 0: free */
    } hints[R2_HINTS];  /* said, and not heard */
    uint32_t hints_said;
    uint32_t hint_top, hint_seen; /* the peer's: newest heard; bit i: top - i was heard */
};

/* There is news about a NIC of ours: said at once, if a path is up, and until it is heard. */
void r2_nicnews_tell(struct r2_peer *p, int nic);
/* A verdict to be repeated until it is heard; its first saying, with the number that this puts into
 * it, is the caller's. */
void r2_nicnews_hint(struct r2_peer *p, struct r2_msg_verdict *m, uint64_t now);
/* What is open, over the path: one was lost, and maybe words with it. */
void r2_nicnews_resync(struct r2_peer *p, struct r2_path *via);
/* Time passes: what is due is said again, over the paths that are up in turn. */
void r2_nicnews_repeat(struct r2_peer *p, uint64_t now);

/* The peer has said something; it hears that it was heard. One of its NICs that has no address is
 * not known here, and its news is of no use; with an address comes a newer one. */
void r2_nicnews_heard_nic(struct r2_path *path, int nic, uint32_t epoch);
/* False: it was heard before. */
bool r2_nicnews_heard_hint(struct r2_path *path, uint32_t number);
int r2_nicnews_on_heard(struct r2_path *path, const uint8_t *body);

#endif
