/* Small messages whose send is done before they are acknowledged.
 *
 * NCCL begins its next operation on a connection when the last send of the one before is done, so
 * an acknowledgement that it waits for is a round trip in each small operation (docs/decisions.md
 * 36). A message of up to R2CCL_EAGER is copied instead when it is first sent: nothing reads the
 * application's buffer any more, and the copy is what is sent again over another path until the
 * peer's engine has acknowledged every byte. What has no way out, because of credit or because no
 * path is up, is not done. A connection that is closed meanwhile lingers: it is not closed for the
 * peer until the copies are acknowledged, or have failed; and a process that exits waits for them
 * (R2CCL_BUFFERED; only with several I/O threads). */
#ifndef R2_ENGINE_MESSAGE_BUFFERED_H
#define R2_ENGINE_MESSAGE_BUFFERED_H

#include <stdbool.h>

struct r2_conn;
struct r2_peer;
struct r2_req;

/* All but the last two under the peer's lock. */

/* S: a small message is about to be sent: from now on its data is the engine's copy. False: it is
 * not copied (R2CCL_BUFFERED, one I/O thread, no memory), and done when it is acknowledged. */
bool r2_buffered_take(struct r2_req *r);
/* S: it was sent: if it is a copy the application learns that it is done. */
void r2_buffered_done(struct r2_req *r);
/* S: acknowledged, or failed; its connection may have waited for that. */
void r2_buffered_free(struct r2_req *r);
/* S: the application closes a connection: whether copies, and only they, are unacknowledged. Then
 * the application's reference is the engine's, and r2_conns_leave ends it. */
bool r2_buffered_lingers(struct r2_conn *c);
/* No exit waits for the connection any more: the peer knows its end, has said its own, or is gone.
 */
void r2_buffered_left(struct r2_conn *c);
/* In the whole process, for whoever waits for none: messages that nobody has acknowledged, and
 * connections that linger. Any thread. */
int r2_buffered_unacked(void);
int r2_buffered_lingering(void);

#endif
