/* Memory of connections (memory.c); what NICs write by themselves: taken back from peers
 * (revoke.c), shown to GPUs (flush.c). */
#ifndef R2_ENGINE_MESSAGE_MEMORY_H
#define R2_ENGINE_MESSAGE_MEMORY_H

#include "engine/path/path.h"

/* ---- memory.c */
/* Lets every lane go of the connection's memory: with the peer's agreement if it may write there,
 * else by force. Under the lock, without it on return. 0, or -ETIMEDOUT: a NIC does not confirm
 * it. `*revoke`: a peer may still hold a key. */
int r2_conn_detach(struct r2_conn *c, bool *revoke);

/* ---- flush.c */
/* Of a request that is a flush: as r2_engine_test. */
int r2_flush_test(struct r2_req *r, int *done);
/* A chunk has arrived over the path; under the lock. */
void r2_flush_note(struct r2_req *r, const struct r2_path *path);
/* R: a generation has been fenced, whose last bytes may still be on their way to a GPU; under the
 * lock. */
void r2_flush_note_fenced(const struct r2_path *path);

/* ---- revoke.c: what was cleared to send is taken back; all under the lock but the first */
/* R: asks the sender of a connection that is closed or failed here to stop, and waits for its
 * answer and for the chunks that it names; at most so long. True: nothing of the connection can be
 * written any more. Takes the peer's lock; the caller holds none. */
bool r2_revoke(struct r2_conn *c);
extern uint64_t r2_revoke_wait_ns; /* 0: by the heartbeats' deadline; tests set it */
/* A chunk of the connection was handed to (S) or came over (R) the path. */
void r2_revoke_count(struct r2_conn *c, const struct r2_path *path);
/* S: a NIC has let go of a chunk. True: the peer is told by a frame, to be sent with the unlock. */
bool r2_revoke_back(struct r2_conn *c, const struct r2_path *path);
int r2_revoke_on_ask(struct r2_path *path, const uint8_t *body);
int r2_revoke_on_answer(struct r2_path *path, const uint8_t *body);
/* R: the sender's word, in REVOKED or CLOSE. */
void r2_revoke_said(struct r2_conn *c, const uint8_t *lanes, uint32_t n);
/* S: fills what it has handed out; the number of entries. */
uint32_t r2_revoke_lanes(const struct r2_conn *c, struct r2_msg_lane out[R2_PATHS_MAX]);

#endif
