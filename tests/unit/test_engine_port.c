/* A NIC without an interface: its port's thread says that the port is down at any moment while I/O
 * thread 0 takes its link up (rung 2). The NIC is down afterwards, in all that is said about it.
 *
 * The moments are those when the I/O thread takes a lock and holds none, and when it has released
 * its last one, in turn. There this program's pthread_mutex_lock() and _unlock() say what the
 * port's thread says. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>

#include "check.h"
#include "enginelib/remote.h"

#define PORT 1
#define MOMENTS 100

static _Thread_local int held, left; /* locks; moments until the port goes down, 0: it does not */
static atomic_bool went_down;

static void go_down(void)
{
    atomic_store(&went_down, true);
    r2_nic_transport(PORT, 1, false, "port down", r2_now_ns());
}

int pthread_mutex_lock(pthread_mutex_t *mutex)
{
    static int (*_Atomic real)(pthread_mutex_t *);
    int rc;

    if (!real)
        real = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_lock");
    if (!held && left && --left == 0)
        go_down();
    rc = real(mutex);
    held += rc == 0;
    return rc;
}

int pthread_mutex_unlock(pthread_mutex_t *mutex)
{
    static int (*_Atomic real)(pthread_mutex_t *);
    int rc;

    if (!real)
        real = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_unlock");
    held--;
    rc = real(mutex);
    if (!held && left && --left == 0)
        go_down();
    return rc;
}

static struct r2_nic_state *port(void)
{
    return &r2_eng.nic_state[PORT];
}

static uint32_t row_link(void)
{
    const struct r2_segment *seg = r2_control_segment(r2_eng.ctl);

    return __atomic_load_n(&seg->nics[port()->row].link, __ATOMIC_ACQUIRE);
}

static uint32_t row_state(void)
{
    const struct r2_segment *seg = r2_control_segment(r2_eng.ctl);

    return __atomic_load_n(&seg->nics[port()->row].state, __ATOMIC_ACQUIRE);
}

/* ---- I/O thread 0 */

static void become_port(int nic)
{
    r2_local.nics[nic].bare = true;
    r2_local.nics[nic].loopback = false;
}

static void is_down(int nic)
{
    r2_nic_transport(nic, 1, false, "port down", r2_now_ns());
}

static void look(int moment)
{
    r2_nic_transport(PORT, 1, true, "port up", r2_now_ns());
    held = 0;
    left = moment;
    r2_niclink_look(PORT, r2_now_ns());
    left = 0;
}

/* Operators hear that nobody can connect to it. */
static void say_deaf(int moment)
{
    r2_nic_transport(PORT, 1, true, "port up", r2_now_ns());
    r2_niclink_look(PORT, r2_now_ns());
    held = 0;
    left = moment;
    r2_nicstate_deaf(PORT, true);
    left = 0;
}

/* Not begun yet, as find_nics leaves it: what was found before the port went down is that it is up.
 */
static void start(int moment)
{
    r2_nic_transport(PORT, 1, true, "port up", r2_now_ns());
    *port() = (struct r2_nic_state){.row = -1, .place = R2_PLACE_UP, .word = R2_NIC_USABLE};
    r2_local.nics[PORT].link_up = true;
    held = 0;
    left = moment;
    r2_nicstate_begin(PORT, r2_now_ns());
    left = 0;
}

static atomic_int health;

static void read_health(int nic)
{
    atomic_store(&health, (int)r2_eng.nic_state[nic].health.state);
}

/* ---- cases */

static bool goes_down_at(int moment, void (*meanwhile)(int moment))
{
    CHECK(remote_command(is_down, PORT));
    CHECK(!r2_nic_is_up(PORT));
    CHECK_EQ(row_link(), R2_SEG_LINK_DOWN);
    atomic_store(&went_down, false);
    CHECK(remote_command(meanwhile, moment));
    CHECK(remote_command(read_health, PORT));
    if (!atomic_load(&went_down)) {
        CHECK(r2_nic_is_up(PORT));
        CHECK_EQ(row_link(), R2_SEG_LINK_UP);
        CHECK_NE(atomic_load(&health), R2_HEALTH_FAILED);
        return false;
    }
    CHECK_MSG(!r2_nic_is_up(PORT), "moment %d", moment);
    CHECK_MSG(row_link() == R2_SEG_LINK_DOWN, "moment %d", moment);
    CHECK_MSG(r2_nic_word(PORT) == R2_NIC_DOWN, "moment %d", moment);
    CHECK_MSG(atomic_load(&health) == R2_HEALTH_FAILED, "moment %d: %s", moment,
              r2_health_word((enum r2_health_state)atomic_load(&health)));
    CHECK_MSG(row_state() == R2_SEG_NIC_FAILED, "moment %d", moment);
    return true;
}

static void goes_down(void (*meanwhile)(int moment), int least)
{
    int moment = 1;

    CHECK(remote_command(become_port, PORT));
    while (moment < MOMENTS && goes_down_at(moment, meanwhile))
        moment++;
    CHECK_GE(moment, least);
    CHECK_LT(moment, MOMENTS);
}

TEST(while_it_comes_up)
{
    goes_down(look, 4);
}

TEST(while_it_is_said_deaf)
{
    goes_down(say_deaf, 3);
}

TEST(while_the_engine_starts)
{
    const struct r2_seg_nic *first = &r2_control_segment(r2_eng.ctl)->nics[0];
    uint32_t state = first->state, link = first->link;

    goes_down(start, 3);
    CHECK_EQ(first->state, state); /* its row is not another's */
    CHECK_EQ(first->link, link);
}

int main(int argc, char **argv)
{
    remote_engine(2, remote_outlives);
    return check_main(argc, argv);
}
