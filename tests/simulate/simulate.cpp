/* Carries out the schedules of shim/plan in SimGrid: how long an AllReduce takes. The steps are
 * those that the executor gets, from r2_schedule_step; the rules of schedule.h hold here as well.
 *
 * Reads one case, a line, and prints what it takes as JSON:
 *
 *   KIND BYTES ROUNDS WINDOW LATENCY FOLD SLOW CHUNKS P OUT IN [OUT IN ...]
 *
 * KIND is direct, ring or r2ccl. BYTES of each rank's data, in pieces so that there are ROUNDS
 * rounds; 0: only the model of shim/plan/shard.h is asked. WINDOW: rounds in work at a time.
 * LATENCY: seconds of each message, which the next one of its stream does not wait for. SLOW and
 * CHUNKS: of r2ccl alone. OUT and IN: bytes per second that each rank sends and receives. SimGrid
 * shares them max-min fairly among the messages in flight.
 *
 * FOLD 1 (direct alone): ranks with equal rates are one group, since they do the same at the same
 * time. A group's port carries what its ranks carry together. Between two groups, a message is
 * split into flows, so that each pair of ranks weighs the same.
 */
#include <simgrid/kernel/Timer.hpp>
#include <simgrid/s4u.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

extern "C" {
#include "plan/schedule.h"
#include "plan/shard.h"
}

namespace sg4 = simgrid::s4u;

namespace
{

constexpr uint64_t AHEAD = 64;                    /* steps of a ring that a rank looks ahead */
constexpr double FEW_FLOWS = 8, MOST_FLOWS = 256; /* between two groups; of all */
constexpr int CHANNELS = 12;                      /* of r2ccl's two rings, where they part */

struct Message {
    int peer;
    uint64_t bytes;
};

/* A step of schedule.h, of a rank or of a group of ranks. */
struct Step {
    uint64_t round = 0, after = 0, reader = 0;
    std::vector<int> in;
    std::vector<Message> up, out; /* up: one at most */
    int down = -1;

    size_t missing = 0; /* contributions */
    size_t unended = 0; /* messages sent or received */
    bool begun = false, added = false, posted = false, up_sent = false, ended = false;
};

struct Case {
    r2_schedule_kind kind;
    uint64_t bytes, rounds, window;
    double latency;
    bool fold;
    int slow;
    unsigned chunks;
    std::vector<r2_shard_node> nodes;
};

/* What a stream's two ends have announced, in list order. */
struct Sending {
    uint64_t step, bytes;
    bool up, ready;
};
struct Receiving {
    uint64_t step;
    bool contribution, posted;
};
struct Stream {
    int from, to, flows = 1, left = 0;
    std::deque<Sending> sends;
    std::deque<Receiving> receives;
};

struct Rank {
    r2_schedule schedule;
    std::deque<std::unique_ptr<Step>> steps; /* from `first` on */
    uint64_t first = 0, entered = 0;
    std::vector<uint64_t> waiting; /* for `after`, or for what comes before the sum */
    /* folded: */
    uint64_t members = 1;
};

class Simulation
{
  public:
    explicit Simulation(const Case &wanted);
    double run();
    uint64_t messages = 0;
    double bound_s, model_s;

  private:
    Case c;
    sg4::Engine *engine;
    std::vector<sg4::Host *> tx, rx;
    std::vector<std::unique_ptr<Rank>> ranks;
    std::vector<int> group_of;
    std::unordered_map<uint64_t, Stream> streams;
    std::unordered_map<const sg4::Activity *, std::pair<sg4::CommPtr, Stream *>> flying;
    double end = 0, tail = 0, scale = 1; /* tail: share of the data; scale: flows of a pair */

    void make_schedules();
    void make_groups();
    void make_ports();
    Step *make_step(int me, uint64_t index);
    std::unique_ptr<Step> folded_step(int me, uint64_t index);
    uint64_t n_steps(int me) const;
    uint64_t group_bytes(int from, int owners, uint64_t round) const;
    double pairs(int from, int to) const;
    void set_scale();
    int flows_of(int from, int to) const;
    Stream &stream(int from, int to, bool sum);
    Step &step(int me, uint64_t index) { return *ranks[me]->steps[index - ranks[me]->first]; }
    bool over(int me, uint64_t index);
    void enter(int me);
    void enter_step(int me, uint64_t index);
    void advance(int me, uint64_t index);
    void ready(int me, uint64_t index, bool up);
    void post(int me, uint64_t index, bool contribution, int from);
    void try_send(Stream &s);
    void flow_ended(Stream &s);
    void sent(int me, uint64_t index, bool up);
    void arrived(int me, uint64_t index, bool contribution);
    void message_ended(int me, uint64_t index);
};

Simulation::Simulation(const Case &wanted) : c(wanted), engine(sg4::Engine::get_instance())
{
    make_schedules();
    make_ports();
    set_scale();
    sg4::Activity::on_completion_cb([this](sg4::Activity const &activity) {
        auto found = flying.find(&activity);
        if (found == flying.end())
            return;
        auto [comm, s] = found->second; /* the reference outlives the entry */
        flying.erase(found);
        flow_ended(*s);
    });
}

/* ---- schedules */

void fail(const std::string &text)
{
    std::cerr << "r2ccl_simulate: " << text << std::endl;
    exit(2);
}

void Simulation::make_schedules()
{
    int p = static_cast<int>(c.nodes.size());
    std::vector<uint32_t> weights(p);
    r2_shard_input model = {p, c.nodes.data(), 1, c.bytes, 0, c.latency * 1e9, 0, 0};
    r2_schedule_data data = {p, c.bytes / 4, 4, 0};
    uint32_t rest = 0, most = 0;

    if (!r2_shard_weights(&model, weights.data()))
        fail("a node has no rate");
    for (uint32_t weight : weights)
        most = std::max(most, weight);
    double share = c.kind == R2_SCHEDULE_DIRECT ? most / 65536.0 : 1.0 / p;
    data.piece = static_cast<size_t>(c.bytes * share / std::max<uint64_t>(1, c.rounds)) + 192;
    model.piece = data.piece;
    if (c.kind == R2_SCHEDULE_R2CCL)
        rest = r2_shard_tail(&model, c.slow);
    tail = rest / 65536.0;
    bound_s = r2_shard_bound_ns(&model) / 1e9;
    model_s = (c.kind == R2_SCHEDULE_DIRECT ? r2_shard_ns(&model, weights.data())
               : c.kind == R2_SCHEDULE_RING ? r2_shard_ring_ns(&model)
                                            : r2_shard_r2ccl_ns(&model, c.slow, rest, c.chunks)) /
              1e9;
    if (c.fold)
        make_groups();
    else
        for (int i = 0; i < p; i++)
            group_of.push_back(i);
    for (int i = 0; i < p; i++) {
        if (group_of[i] < static_cast<int>(ranks.size())) {
            ranks[group_of[i]]->members++;
            continue;
        }
        ranks.push_back(std::make_unique<Rank>());
        r2_schedule *s = &ranks.back()->schedule;
        int rc = c.kind == R2_SCHEDULE_DIRECT ? r2_schedule_direct(s, &data, i, weights.data())
                 : c.kind == R2_SCHEDULE_RING
                     ? r2_schedule_ring(s, &data, i)
                     : r2_schedule_r2ccl(s, &data, i, c.slow, rest, c.chunks);
        if (rc)
            fail("the schedule refuses this case");
    }
}

/* Numbered by their first ranks. */
void Simulation::make_groups()
{
    std::map<std::pair<double, double>, int> known;

    if (c.kind != R2_SCHEDULE_DIRECT)
        fail("only direct can be folded");
    for (const r2_shard_node &node : c.nodes)
        group_of.push_back(
            known.emplace(std::make_pair(node.out, node.in), static_cast<int>(known.size()))
                .first->second);
}

uint64_t Simulation::n_steps(int me) const
{
    const Rank &rank = *ranks[me];

    return c.fold ? rank.schedule.n_rounds * ranks.size() : rank.schedule.n_steps;
}

Step *Simulation::make_step(int me, uint64_t index)
{
    Rank &rank = *ranks[me];
    r2_step s;

    if (c.fold) {
        rank.steps.push_back(folded_step(me, index));
        return rank.steps.back().get();
    }
    rank.steps.push_back(std::make_unique<Step>());
    Step *made = rank.steps.back().get();
    r2_schedule_step(&rank.schedule, index, &s);
    made->round = s.round;
    made->after = s.after;
    made->reader = s.reader;
    if (s.count == 0)
        return made;
    uint64_t bytes = s.count * rank.schedule.elem;
    made->in.assign(s.in, s.in + s.n_in);
    if (s.up >= 0)
        made->up.push_back({s.up, bytes});
    made->down = s.down;
    for (int i = 0; i < s.n_out; i++)
        made->out.push_back({s.out[i], bytes});
    return made;
}

/* What one rank of the group sends in this round to all owners of another, or of its own. */
uint64_t Simulation::group_bytes(int from, int owners, uint64_t round) const
{
    const r2_schedule &schedule = ranks[from]->schedule;
    uint64_t n = static_cast<uint64_t>(schedule.n_owners), sum = 0;
    r2_step s;

    for (uint64_t i = round * n; i < (round + 1) * n; i++) {
        r2_schedule_step(&schedule, i, &s);
        if (s.up >= 0 && group_of[s.up] == owners)
            sum += s.count * schedule.elem;
    }
    return sum;
}

/* Of each round one step for each group of owners; the group's own one is the last. */
std::unique_ptr<Step> Simulation::folded_step(int me, uint64_t index)
{
    auto made = std::make_unique<Step>();
    int n = static_cast<int>(ranks.size());
    int owners = (me + 1 + static_cast<int>(index % n)) % n;

    made->round = index / n;
    if (owners != me) {
        uint64_t bytes = ranks[me]->members * group_bytes(me, owners, made->round);
        if (bytes) {
            made->up.push_back({owners, bytes});
            made->down = owners;
        }
        return made;
    }
    for (int i = 0; i < n; i++) {
        uint64_t bytes = ranks[i]->members * group_bytes(i, me, made->round);
        if (!bytes)
            continue;
        /* Within the group: its own contributions, and then its own sums, as messages to itself. */
        made->in.push_back(i);
        made->out.push_back({i, bytes});
    }
    return made;
}

/* ---- ports */

void Simulation::make_ports()
{
    static int number = 0;
    std::string name = "zone" + std::to_string(number++);
    sg4::NetZone *zone = sg4::create_star_zone(name);
    size_t n = ranks.size();
    std::vector<double> out(n), in(n);

    for (size_t i = 0; i < c.nodes.size(); i++) {
        out[group_of[i]] += c.nodes[i].out;
        in[group_of[i]] += c.nodes[i].in;
    }
    for (size_t i = 0; i < n; i++) {
        std::string id = name + "-" + std::to_string(i);
        sg4::Host *from = zone->create_host(id + "t", 1e9), *to = zone->create_host(id + "r", 1e9);
        sg4::Link *up = zone->create_link(id + "u", out[i])->set_latency(0)->seal();
        sg4::Link *down = zone->create_link(id + "d", in[i])->set_latency(0)->seal();
        zone->add_route(from->get_netpoint(), nullptr, nullptr, nullptr, {sg4::LinkInRoute(up)},
                        false);
        zone->add_route(nullptr, to->get_netpoint(), nullptr, nullptr, {sg4::LinkInRoute(down)},
                        false);
        tx.push_back(from);
        rx.push_back(to);
    }
    zone->seal();
}

/* Of a rank of one group and one of the other. */
double Simulation::pairs(int from, int to) const
{
    return static_cast<double>(ranks[from]->members) *
           static_cast<double>(ranks[to]->members - (from == to));
}

/* So that the fewest pairs of two groups are some flows, and all flows are not too many. */
void Simulation::set_scale()
{
    double all = static_cast<double>(c.nodes.size()), fewest = all * all;

    for (int i = 0; i < static_cast<int>(ranks.size()); i++)
        for (int j = 0; j < i; j++)
            fewest = std::min(fewest, pairs(i, j));
    scale = std::min(FEW_FLOWS / fewest, MOST_FLOWS / (all * all));
}

/* By how many flows a message weighs. */
int Simulation::flows_of(int from, int to) const
{
    double weight = 0;
    int p = static_cast<int>(c.nodes.size());

    if (c.fold)
        weight = scale * pairs(from, to);
    else if (c.kind == R2_SCHEDULE_R2CCL && (from == c.slow || to == c.slow))
        weight = CHANNELS * (1 - tail);
    else if (c.kind == R2_SCHEDULE_R2CCL && (from + 1) % p == c.slow)
        weight = CHANNELS * tail;
    return std::max(1,
                    static_cast<int>(std::ceil(weight))); /* the few shall not wait for the many */
}

Stream &Simulation::stream(int from, int to, bool sum)
{
    uint64_t key = (static_cast<uint64_t>(from) << 32) | (static_cast<uint64_t>(to) << 1) | sum;
    auto [at, made] = streams.try_emplace(key);
    Stream &s = at->second;

    if (made) {
        s.from = from;
        s.to = to;
        s.flows = flows_of(from, to);
    }
    return s;
}

/* ---- steps */

bool Simulation::over(int me, uint64_t index)
{
    const Rank &rank = *ranks[me];

    return index < rank.first || (index < rank.entered && step(me, index).ended);
}

/* Begins what the window lets in. */
void Simulation::enter(int me)
{
    Rank &rank = *ranks[me];

    for (;;) {
        while (!rank.steps.empty() && rank.steps.front()->ended) {
            rank.steps.pop_front();
            rank.first++;
        }
        if (rank.entered == n_steps(me))
            break;
        if (c.kind == R2_SCHEDULE_RING && rank.entered - rank.first >= AHEAD)
            break;
        if (rank.first + rank.steps.size() == rank.entered)
            make_step(me, rank.entered);
        if (rank.steps.front()->round + c.window <= rank.steps.back()->round)
            break;
        enter_step(me, rank.entered++);
    }
    std::vector<uint64_t> again;
    again.swap(rank.waiting);
    for (uint64_t index : again)
        if (!over(me, index))
            advance(me, index);
}

void Simulation::enter_step(int me, uint64_t index)
{
    Step &s = step(me, index);

    s.missing = s.in.size();
    s.unended = s.in.size() + s.up.size() + s.out.size() + (s.down >= 0);
    if (s.unended == 0) {
        s.ended = true;
        return;
    }
    for (int from : s.in)
        stream(from, me, false).receives.push_back({index, true, false});
    if (s.down >= 0)
        stream(s.down, me, true).receives.push_back({index, false, false});
    for (const Message &m : s.up)
        stream(me, m.peer, false).sends.push_back({index, m.bytes, true, false});
    for (const Message &m : s.out)
        stream(me, m.peer, true).sends.push_back({index, m.bytes, false, false});
    if (c.fold)
        for (const Message &m : s.out)
            if (m.peer == me) {
                stream(me, me, false).sends.push_back({index, m.bytes, true, false});
                stream(me, me, true).receives.push_back({index, false, false});
                s.unended += 2;
            }
    advance(me, index);
}

/* Does what this step can do by now. */
void Simulation::advance(int me, uint64_t index)
{
    Step &s = step(me, index);

    if (!s.begun && s.after > ranks[me]->first) {
        ranks[me]->waiting.push_back(index);
        return;
    }
    if (!s.begun) {
        s.begun = true;
        std::vector<int> in = s.in;
        for (int from : in)
            post(me, index, true, from);
        if (c.fold && !s.in.empty()) {
            ready(me, index, true); /* the group's own contributions to itself */
            post(me, index, false, me);
        }
    }
    if (s.down >= 0 && !s.posted && (s.up.empty() || s.up_sent)) {
        if (s.reader && !over(me, s.reader - 1)) {
            ranks[me]->waiting.push_back(index);
        } else {
            s.posted = true;
            post(me, index, false, s.down);
        }
    }
    if (s.missing == 0 && !s.added) {
        s.added = true;
        if (!s.up.empty())
            ready(me, index, true);
        else if (s.down < 0)
            ready(me, index, false);
    }
}

void Simulation::ready(int me, uint64_t index, bool up)
{
    const Step &s = step(me, index);
    std::vector<int> peers;

    if (up && s.up.empty())
        peers.push_back(me);
    for (const Message &m : up ? s.up : s.out)
        peers.push_back(m.peer);
    for (int peer : peers) {
        Stream &to = stream(me, peer, !up);
        for (Sending &send : to.sends)
            if (send.step == index && send.up == up)
                send.ready = true;
        try_send(to);
    }
}

void Simulation::post(int me, uint64_t index, bool contribution, int from)
{
    Stream &s = stream(from, me, !contribution);

    for (Receiving &receive : s.receives)
        if (receive.step == index)
            receive.posted = true;
    try_send(s);
}

/* ---- messages */

void Simulation::try_send(Stream &s)
{
    if (s.left || s.sends.empty() || s.receives.empty() || !s.sends.front().ready ||
        !s.receives.front().posted)
        return;
    s.left = s.flows;
    for (int i = 0; i < s.flows; i++) {
        auto comm = sg4::Comm::sendto_init(tx[s.from], rx[s.to]);
        comm->set_payload_size(std::max<uint64_t>(1, s.sends.front().bytes / s.flows));
        flying[comm.get()] = {comm, &s};
        comm->start();
    }
}

void Simulation::flow_ended(Stream &s)
{
    if (--s.left)
        return;
    messages++;
    Sending send = s.sends.front();
    Receiving receive = s.receives.front();
    int from = s.from, to = s.to;
    s.sends.pop_front();
    s.receives.pop_front();
    try_send(s);
    auto both = [this, from, to, send, receive] {
        sent(from, send.step, send.up);
        arrived(to, receive.step, receive.contribution);
    };
    if (c.latency > 0)
        simgrid::kernel::timer::Timer::set(sg4::Engine::get_clock() + c.latency, both);
    else
        both();
}

void Simulation::sent(int me, uint64_t index, bool up)
{
    Step &s = step(me, index);

    if (up)
        s.up_sent = true;
    message_ended(me, index);
}

void Simulation::arrived(int me, uint64_t index, bool contribution)
{
    Step &s = step(me, index);

    if (contribution)
        s.missing--;
    else
        ready(me, index, false); /* the sum, for those after me */
    message_ended(me, index);
}

void Simulation::message_ended(int me, uint64_t index)
{
    Step &s = step(me, index);

    if (--s.unended == 0) {
        s.ended = true;
        end = sg4::Engine::get_clock();
        enter(me);
    } else {
        advance(me, index);
    }
}

double Simulation::run()
{
    double start = sg4::Engine::get_clock();

    for (size_t i = 0; i < ranks.size(); i++)
        enter(static_cast<int>(i));
    engine->run();
    for (size_t i = 0; i < ranks.size(); i++)
        if (ranks[i]->first + ranks[i]->steps.size() < n_steps(static_cast<int>(i)) ||
            !ranks[i]->steps.empty())
            fail("a schedule did not end");
    return end - start;
}

/* ---- cases */

bool read_case(const std::string &line, Case &c)
{
    std::istringstream words(line);
    std::string kind;
    int p = 0;

    words >> kind >> c.bytes >> c.rounds >> c.window >> c.latency >> c.fold >> c.slow >> c.chunks >>
        p;
    if (!words || p < 2 || p > R2_SCHEDULE_RANKS || !c.bytes || !c.window)
        return false;
    if (kind == "direct")
        c.kind = R2_SCHEDULE_DIRECT;
    else if (kind == "ring")
        c.kind = R2_SCHEDULE_RING;
    else if (kind == "r2ccl")
        c.kind = R2_SCHEDULE_R2CCL;
    else
        return false;
    c.nodes.resize(p);
    for (r2_shard_node &node : c.nodes)
        words >> node.out >> node.in;
    return !words.fail();
}

} // namespace

int main(int argc, char **argv)
{
    std::string line;
    Case c;

    sg4::Engine engine(&argc, argv);
    /* Bytes over rate, and nothing else. */
    sg4::Engine::set_config("network/model:CM02");
    sg4::Engine::set_config("network/crosstraffic:0");
    sg4::Engine::set_config("network/TCP-gamma:0");
    sg4::Engine::set_config("network/bandwidth-factor:1");
    sg4::Engine::set_config("network/latency-factor:1");
    if (!std::getline(std::cin, line))
        return 0;
    if (!read_case(line, c))
        fail("no case: " + line.substr(0, 100));
    Simulation simulation(c);
    double seconds = c.rounds ? simulation.run() : simulation.model_s;
    printf("{\"seconds\": %.9g, \"bound\": %.9g, \"model\": %.9g, \"messages\": %llu}\n", seconds,
           simulation.bound_s, simulation.model_s,
           static_cast<unsigned long long>(simulation.messages));
    return 0;
}
