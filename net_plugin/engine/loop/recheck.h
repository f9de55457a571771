/* A second look at what was left to I/O threads that may have no core, or too much to do: bulk
 * lanes that were asked for what waits, frames that a control socket's thread was to send. Whoever
 * polls for a message, of whatever peer, has it done once they have had 300 us or so; what nobody
 * polls for has the peer's tick, and so have test chunks, copies, what a full socket holds up, and
 * what queue pairs are asked for but frames. Not where one thread does all. */
#ifndef R2_ENGINE_LOOP_RECHECK_H
#define R2_ENGINE_LOOP_RECHECK_H

#include <stdint.h>

struct r2_peer;

/* By a caller that polls, without locks. A peer whose lock is taken is left for later. */
void r2_recheck(void);

#endif
