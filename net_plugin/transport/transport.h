/* The boundary between the engine and a transport (tcp, verbs, both behind the mux, or the tests'
 * fake).
 *
 * An endpoint (`struct r2_ep`) is one generation of one path: the sockets or queue pairs between
 * one local NIC and one NIC of one peer process. The connecting side sends bulk data, the
 * accepting side receives it; control frames flow both ways and never queue behind bulk.
 *
 * Work is pulled. The engine says "there is work" (kick, flush). The transport asks for the next
 * chunk or the next control bytes when it has room for them.
 *
 * Locks: a transport may hold its own locks during an upcall, and upcalls take the peer's lock.
 * Therefore the engine never calls an operation marked [locks] while it holds a peer's lock.
 * Every entry of both tables is always set.
 *
 * One-sided transports: `r2_bulk.remote_addr` carries address and key from the clear-to-send. For
 * every transport the engine fences the receiver (DOWN, FENCED: oob/wire.h) before it hands a chunk
 * out again. So a second write of the same bytes never races with the first. The bytes are in place
 * when the transport learns of them, so chunk_claim and chunk_done follow each other.
 *
 * Several transports may serve one NIC (transport/mux): each endpoint belongs to one of them, which
 * r2_ep_params.transport names, and so does the path. A transport that runs behind the mux begins
 * its struct r2_ep with a struct r2_ep_head.
 */
#ifndef R2_TRANSPORT_TRANSPORT_H
#define R2_TRANSPORT_TRANSPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "oob/wire.h"
#include "topology/nics.h"

struct r2_ep;      /* owned by the transport, reference counted */
struct r2_mr_keys; /* a transport's registration of one range on all its NICs */
struct r2_transport_ops;

/* Number of a transport, on the wire as well; a better one is preferred. */
enum r2_transport_id {
    R2_VIA_TCP = 0,   /* two-sided */
    R2_VIA_VERBS = 1, /* one-sided: the peer writes by address and key */
    R2_VIA_COUNT
};

struct r2_ep_head {
    const struct r2_transport_ops *ops;
};

/* Memory to be registered. `dmabuf_fd` < 0: by its address; else the range begins `dmabuf_offset`
 * bytes into that object. `device`: no thread may read or write it. */
struct r2_memory {
    void *data;
    size_t size;
    bool device;
    int dmabuf_fd;
    uint64_t dmabuf_offset;
};

/* What kinds of memory a NIC reads and writes. */
#define R2_MEMORY_HOST 1u
#define R2_MEMORY_DEVICE 2u /* by its address (peer memory) */
#define R2_MEMORY_DMABUF 4u

/* A piece of a message. `data` is the sender's memory (tx) or the place to write (rx). */
struct r2_bulk {
    uint64_t conn;   /* connection id, unique within the connecting process */
    uint64_t seq;    /* message of the connection */
    uint64_t offset; /* bytes from the start of the message, a multiple of 128 */
    uint64_t total;  /* bytes of the whole message */
    uint32_t len;
    uint32_t crc; /* CRC32C of the chunk when R2_BULK_CRC is set */
    uint32_t flags;
    uint8_t *data;
    uint64_t remote_addr; /* one-sided transports: where to write */
    uint32_t remote_key;
    const struct r2_mr_keys *keys; /* of the sender's memory */
    uint32_t unsent;               /* tx, said with chunk_sent: bytes of it that never left */
    uint16_t lane; /* tx: the bulk lane that takes it, 0 ..: set before next_chunk is asked */
};
/* Connection id of test chunks, which prove a path before it carries anything of the job; real ones
 * begin at 1. Of one-sided endpoints they are R2_TEST_LEN bytes, the first R2_TEST_EACH of each
 * lane that are taken at all: the transport has their bytes and the place for them, and claims none
 * that did not arrive whole. Several packets of the largest kind (4096 bytes), because small ones
 * may pass where those do not. */
#define R2_CONN_TEST 0
#define R2_TEST_LEN (16 * 1024)
#define R2_TEST_EACH 4
#define R2_BULK_CRC 1u
/* rx: placed with r2_copy_lines, because its reader does not wait for the end. */
#define R2_BULK_LINES 2u
/* A copy of a chunk that is under way over another path as well (two-sided transports): received
 * beside its place, and claimed when it is whole. */
#define R2_BULK_COPY 4u
/* The sender waits for slow NICs (two-sided transports; a hint). */
#define R2_BULK_LIMITED 8u

/* What connects two NICs; filled by the engine for connect, by the transport for accepted. */
struct r2_ep_params {
    uint8_t local_process[16];
    uint8_t remote_process[16];
    uint8_t secret[16]; /* of the accepting process */
    uint8_t local_nic;
    uint8_t remote_nic;
    uint8_t transport; /* enum r2_transport_id */
    bool initiator;
    bool extra;   /* the initiator has another path: it may be refused where descriptors are few */
    uint32_t gen; /* generation, allotted by the connecting side */
    uint16_t packet; /* S, sockets: no larger packets either way; 0: as large as the NIC takes */
    struct r2_wire_addr remote_addr;
    void *owner; /* the engine's path */
    bool probe;  /* only ask who answers there: ends in `failed`, err EALREADY if the
                    peer's process did. Unless it is `locate`, this process is the accepting one of
                    the two, and says where its NIC is now (`called` over there) */
    bool locate; /* a probe of engine/locate: owner is its struct r2_probe */
};

/* How an endpoint is, as the kernel or the NIC sees it. */
struct r2_ep_health {
    bool answered;        /* everything handed over up to the last mark was answered; of a probe:
                             its host's kernel took the connection */
    bool stalled;         /* bulk bytes are with the kernel or the NIC, and since the last look
                             none of them was acknowledged by the peer's */
    bool refused;         /* the failure was a refusal by a living host */
    const char *cause;    /* of the failure, for people: static text, or NULL */
    bool other_process;   /* somebody else answered at the peer's address */
    bool there;           /* the peer's process has answered, whatever became of it: it lives, as
                             an attempt has proved; a probe knows no secret to prove it by */
    bool given_up;        /* ... and has given this one up: that is proven */
    uint64_t rtt_ns;      /* the network's smoothed round trip, 0 if unknown */
    uint64_t rttvar_ns;   /* and its mean deviation */
    uint64_t segments;    /* of data sent since the endpoint came up, over all lanes */
    uint64_t retransmits; /* of them, sent again */
};

/* Upcalls, implemented by the engine (engine/loop/upcalls.c). `owner` is r2_ep_params.owner, or
 * what `accepted` returned. */
struct r2_transport_events {
    /* An authenticated peer asks for a path. Returns the owner, or NULL to refuse. */
    void *(*accepted)(struct r2_ep *ep, const struct r2_ep_params *params);
    /* Secret of this process if `process` is this process's id, else -ESRCH. */
    int (*secret)(const uint8_t process[16], uint8_t secret[16]);
    /* Secret of accepting process `process` if this one has a connection to it, else -ESRCH. */
    int (*caller)(const uint8_t process[16], uint8_t secret[16]);
    /* It has proven itself: its NIC `nic` is at `addr` now. */
    void (*called)(const uint8_t process[16], int nic, const struct r2_wire_addr *addr);
    /* That process was given up in this direction, and its connections have failed (`out` as in
     * engine/objects.h). */
    bool (*given_up)(const uint8_t process[16], bool out);
    /* A socket that came to NIC `nic` was sent away before it was an endpoint: it proved nothing,
     * asked for another process, was too slow, or came too late (err, a positive errno). */
    void (*rejected)(int nic, int err);
    /* The endpoint carries control frames from now on. */
    void (*up)(void *owner, struct r2_ep *ep);
    /* The endpoint broke or never came up; called once, no transport lock held; the engine
     * answers with ops->shut later, from its own thread. `err` is a positive errno. */
    void (*failed)(void *owner, struct r2_ep *ep, int err, const struct r2_ep_health *health);
    /* The kernel does not tell the state of connections here: operators are told. Once; any thread,
     * any lock of the transport. */
    void (*blind)(void);
    /* The NIC by which NICs without an address (r2_nic.bare) meet their peers: the first that is
     * up, else the first; -1: there is none. Any thread. */
    int (*meeting)(void);
    /* A transport's half of a NIC went away or came back, while the link's may be as it was. */
    void (*nic_link)(int nic, int transport, bool up, const char *cause);
    /* `shut` that was under way is over: it returns 0 now. Any lock of the transport. */
    void (*shut_over)(void *owner, struct r2_ep *ep);
    /* No other path leads to the peer now that could carry what this one does. Any lock of the
     * transport. */
    bool (*alone)(void *owner, struct r2_ep *ep);
    /* The last reference to an endpoint that has an owner is gone; no lock is needed or held by
     * the transport. */
    void (*released)(void *owner, const struct r2_ep_params *params);
    /* One control frame; `body` is valid during the call. < 0: protocol violation, ends the ep. */
    int (*ctrl)(void *owner, struct r2_ep *ep, uint8_t type, const uint8_t *body, size_t len);
    /* Up to `cap` bytes of control frames to send; 0: none. */
    size_t (*next_ctrl)(void *owner, struct r2_ep *ep, uint8_t *buf, size_t cap);
    /* `sent` control bytes of this endpoint in all have reached the kernel or the NIC. */
    void (*ctrl_sent)(void *owner, struct r2_ep *ep, uint64_t sent);
    /* The next chunk for this endpoint, false: none now. */
    bool (*next_chunk)(void *owner, struct r2_ep *ep, struct r2_bulk *bulk);
    /* A lane that counted as at work takes no more for now: what waits is for another one. */
    void (*blocked)(void *owner, struct r2_ep *ep);
    /* The transport no longer reads the chunk's bytes. */
    void (*chunk_sent)(void *owner, struct r2_ep *ep, const struct r2_bulk *bulk);
    /* Two-sided receive. 0: write to bulk->data, then chunk_done or chunk_dropped;
     * 1: drain the bytes and forget them; < 0: protocol violation. */
    int (*chunk_claim)(void *owner, struct r2_ep *ep, struct r2_bulk *bulk, uint16_t lane);
    void (*chunk_done)(void *owner, struct r2_ep *ep, const struct r2_bulk *bulk);
    /* The claim is given back unwritten or half written (`bad_crc`: it failed verification).
     * A copy (R2_BULK_COPY) that was not claimed yet has none to give back. */
    void (*chunk_dropped)(void *owner, struct r2_ep *ep, const struct r2_bulk *bulk, bool bad_crc);
    /* End of a burst of arrivals, chunks and frames alike: what they brought is acknowledged and
     * answered now, not before. Must follow them soon. */
    void (*burst_end)(void *owner, struct r2_ep *ep);
};

/* The RDMA port behind a NIC, for `r2ccl-ctl nics`; numbers as in control/segment.h. */
struct r2_rdma_info {
    char device[24];
    uint32_t port, state, phys, link, gbps, queue_pairs, lid;
    uint8_t gid[16];
    bool active; /* paths can be made by it; known before the device says it in `state` */
};

struct r2_transport_ops {
    const char *name;
    /* Starts the transport: listens on every NIC. Once per process. 0 or -errno. */
    int (*start)(const struct r2_transport_events *events, const uint8_t process[16]);
    /* Where peers reach NIC `nic`, and by which transports (`offers`); -ENODEV: this transport
     * does not use that NIC. */
    int (*address)(int nic, struct r2_wire_addr *out);
    /* The same by its address of the other family; -ENODEV: it has none. NULL: no NIC has. */
    int (*second)(int nic, struct r2_wire_addr *out);
    /* The NIC's address or interface is another one (r2_local_now): listens there from now on,
     * on the same port if it is free, and reads again what else depends on it. Endpoints of the old
     * place are not touched. 0 or -errno: nobody listens, to be tried again. Of one thread. */
    int (*rebind)(int nic);
    /* False: no RDMA behind that NIC. */
    bool (*rdma)(int nic, struct r2_rdma_info *out);
    /* Sockets or queue pairs open now. */
    unsigned (*sockets)(void);
    /* Ports that belong to none of the `n` NICs and are to be NICs of their own (r2_nic.bare):
     * writes at most `max`, returns how many; `seed` gets a hash of each one's hardware. Before
     * `start`, of one thread. */
    int (*ports)(const struct r2_nic *nics, int n, struct r2_nic *out, uint64_t *seed, int max);
    /* The RDMA device did not answer when `ports` asked for its, or could not be opened, so that
     * nobody knows them. After that, any lock. */
    bool (*left_out)(const char *device);
    /* Begins to connect; the outcome is `up` or `failed`. The engine owns one reference.
     * An immediate -errno (no endpoint) is as good as `failed`, and `released` has been said;
     * -ECONNREFUSED is a refusal. */
    int (*connect)(const struct r2_ep_params *params, struct r2_ep **out);
    /* Bulk work for about `chunks` chunks is there, worth that `lanes` bulk lanes are at it: its
     * first ones that are not blocked. A hint. Any thread, any lock. */
    void (*kick)(struct r2_ep *ep, unsigned chunks, unsigned lanes);
    /* One chunk of work is there and the caller may send it itself, now, if a lane is free; false:
     * it did not. [locks] */
    bool (*push)(struct r2_ep *ep);
    /* Control frames are there: sends them now if it can. [locks] */
    void (*flush)(struct r2_ep *ep);
    /* The same for a thread with other things to do: may leave it to an I/O thread that is awake.
     * lone: no other frames came shortly before (over sockets it counts with one I/O thread only);
     * data: a message may be among them. [locks] */
    void (*flush_soon)(struct r2_ep *ep, bool lone, bool data);
    /* Makes progress on arrivals of control frames, without blocking. False: left to an I/O thread
     * that is awake and does. [locks] */
    bool (*help)(struct r2_ep *ep);
    /* Ends the endpoint. On return of 0 no byte of it can land, nobody reads or writes message
     * memory for it, and no further upcall comes. -EINPROGRESS: that is not confirmed yet; the
     * transport goes on by itself and says `shut_over`. Until then it must not be assumed, however
     * long it takes. Idempotent. [locks] */
    int (*shut)(struct r2_ep *ep);
    /* Lets go of messages of `conn` with first <= seq <= last. On return no thread, socket or queue
     * pair of this endpoint touches their memory. The engine has already made sure that they are
     * neither handed out nor claimed again. Waits for local hardware only, in bounded time;
     * -ETIMEDOUT: the hardware did not confirm it. `cleared`: the peer may have been told to write
     * into their memory. [locks] */
    int (*detach)(struct r2_ep *ep, uint64_t conn, uint64_t first, uint64_t last, bool cleared);
    /* Two-sided: the lane that reads this chunk into its place lets go of it (chunk_dropped) and
     * drains the rest; true when it did. Never waits: false when the lane is at it this moment,
     * or reads something else. The caller may hold the lock of another lane. [locks] */
    bool (*revoke)(struct r2_ep *ep, unsigned lane, const struct r2_bulk *chunk);
    void (*get)(struct r2_ep *ep);
    void (*put)(struct r2_ep *ep);
    /* Marks what has been handed over so far (any lock); `health` [locks] then tells whether it
     * was answered. */
    void (*mark)(struct r2_ep *ep);
    void (*health)(struct r2_ep *ep, struct r2_ep_health *out);
    /* Not up yet: the peer's kernel has taken the connection and all that was said on it. So the
     * way is there, and only its process is missing. Any lock. */
    bool (*reached)(struct r2_ep *ep);
    unsigned (*lanes)(struct r2_ep *ep); /* bulk lanes that are ready and in use */
    /* Bulk lanes that it is to have in all, ready or not; known when it is up. Any lock. */
    unsigned (*planned)(struct r2_ep *ep);
    /* So many of its bulk lanes get chunks from now on; all while it is not called. NULL: not by
     * number. Any lock. */
    void (*use)(struct r2_ep *ep, unsigned lanes);
    const struct r2_ep_params *(*params)(const struct r2_ep *ep);
    /* After an injected fault of a NIC changed: look again. [locks] */
    void (*nudge)(struct r2_ep *ep);
    /* Kinds of memory (R2_MEMORY_*) that NIC `nic` can use; before `start`, too. */
    unsigned (*memory)(int nic);
    /* NULL keys: the transport needs none. */
    int (*reg)(const struct r2_memory *memory, struct r2_mr_keys **out);
    /* 0 when no NIC can use the registration any more, else -ETIMEDOUT. `revoke`: a peer may still
     * hold its key, which must be dead on return even if the range is registered by others, too. */
    int (*dereg)(struct r2_mr_keys *keys, bool revoke);
    /* Keys for the peer, one per NIC of this process (0: that NIC has none). Returns how many. */
    int (*remote_keys)(const struct r2_mr_keys *keys, uint32_t out[R2_WIRE_MAX_NICS]);
    /* The endpoint can send from memory with this registration. Any lock. */
    bool (*registered)(const struct r2_ep *ep, const struct r2_mr_keys *keys);
    /* Asks NIC `nic` for a byte at `at`, which is in the registration: when it has come, everything
     * that the NIC wrote before is visible to the memory's owner. Any lock. `ticket` is for
     * `flushed`: 1 it has come, 0 not yet, -errno: it will not. */
    int (*flush_memory)(int nic, const struct r2_mr_keys *keys, const void *at, uint64_t *ticket);
    int (*flushed)(int nic, uint64_t ticket);
    /* In a forked child: forget everything, close nothing of the parent's connections by
     * protocol, only the child's descriptors. Async-signal-safe. */
    void (*child)(void);
};

extern const struct r2_transport_ops r2_transport_tcp;
extern const struct r2_transport_ops r2_transport_verbs;
extern const struct r2_transport_ops r2_transport_mux; /* both */

/* Whether two NICs can be connected by the transport, as their addresses say. */
static inline bool r2_transport_fits(int transport, const struct r2_wire_addr *a,
                                     const struct r2_wire_addr *b)
{
    uint8_t both = a->offers & b->offers;

    if (transport == R2_VIA_VERBS)
        return both & (R2_OFFER_INFINIBAND | R2_OFFER_ROCE);
    return !((a->offers | b->offers) & R2_OFFER_NO_TCP);
}

/* Traffic class that a communicator asks for, 0 to 255 (below 0: none). The first one counts, on
 * paths made from then on; another one is refused with a warning. Any thread. */
void r2_traffic_class_ask(int asked);
/* 0 to 255; -1: none was asked for. */
int r2_traffic_class(void);

#endif
