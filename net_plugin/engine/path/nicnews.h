/* What one process tells another about its NICs (frame INFO), repeated until the other side says
 * that it has heard it (frame HEARD). It is a state, not an event: what is repeated is what holds
 * by then, and who has heard a number need not hear an older one.
 *
 * Units: nanoseconds. Everything here is under the peer's lock. */
#ifndef R2_ENGINE_PATH_NICNEWS_H
#define R2_ENGINE_PATH_NICNEWS_H

struct r2_path;

/* Part of a peer. */
struct r2_nicnews {
    uint32_t heard;     /* the newest number that the peer has heard */
    uint64_t due, wait; /* when what is open is said again; how long it waited for that */
    unsigned turn;      /* of the path that the next repetition takes */
};

/* There is news about a NIC of ours: said at once, if a path is up, and until it is heard. */
void r2_nicnews_tell(struct r2_peer *p);
/* What is open, over the path: one was lost, and maybe words with it. */
void r2_nicnews_resync(struct r2_peer *p, struct r2_path *via);
/* Time passes: what is due is said again, over the paths that are up in turn. */
void r2_nicnews_repeat(struct r2_peer *p, uint64_t now);

/* An INFO of the peer's has come: it hears that it was heard, over the path that brought it unless
 * that has just ended by what it said. */
void r2_nicnews_heard(struct r2_path *path);
int r2_nicnews_on_heard(struct r2_path *path, const uint8_t *body);

#endif
