//! Tests that slots and ids are given out again only when no program can be reading them.

use std::{
    os::fd::{AsFd, AsRawFd, OwnedFd},
    thread,
};

use aya_obj::generated::bpf_attach_type;
use proxy_ctl::{
    config::Limits,
    model::{desired::Changes, objects::IpFamily},
    modes::Dataplane,
    sys::bpf::{
        self, MapInfo,
        grace::GracePeriod,
        map::{Map, kind::ARRAY},
    },
};

use crate::{
    desired::{change, endpoint, name, port, shared},
    sandbox::Sandbox,
};

/// A program that each `connect` in the cgroup runs [`TIMES`] times, without a grace period in
/// between. That takes some 30 ms.
struct SlowReader {
    /// Two halves of 32 bits each: how far the program is, and how many times it has ended.
    progress: Map<u32, u64>,
    _links: Vec<OwnedFd>,
}

/// The number of rounds of the program's loop. The verifier follows each round, and allows a
/// million instructions.
const LOOPS: u32 = 190_000;
const TIMES: u64 = 8;

impl SlowReader {
    fn new(sandbox: &Sandbox) -> Self {
        const CGROUP_SOCK_ADDR: u32 = 18;
        let shape = MapInfo { kind: ARRAY, key_size: 4, value_size: 8, max_entries: 1, ..MapInfo::default() };
        let progress = Map::new(bpf::create_map(&shape, None).unwrap()).unwrap().unwrap();
        let number = |value: u32| u64::from(value) << 32;
        let map = u32::try_from(progress.fd().as_raw_fd()).unwrap();
        let instructions = [
            // r6 = address of the value; r7 = 0
            0x2618 | number(map),
            0,
            0x07b7,
            // bpf_ktime_get_ns(); r7 += 1; first half = r7; again if r7 < LOOPS
            0x85 | number(5),
            0x0707 | number(1),
            0x7663,
            0xfffc_07a5 | number(LOOPS),
            // r1 = second half; r1 += 1; second half = r1
            0x0004_6161,
            0x0107 | number(1),
            0x0004_1663,
            // return 1
            0x00b7 | number(1),
            0x95,
        ];
        let connect4 = bpf_attach_type::BPF_CGROUP_INET4_CONNECT;
        let program = bpf::load_program(CGROUP_SOCK_ADDR, connect4 as u32, &instructions).unwrap();
        let link = |_| bpf::link_cgroup(program.as_fd(), sandbox.cgroup().as_fd(), connect4).unwrap();
        Self { progress, _links: (0..TIMES).map(link).collect() }
    }

    fn progress(&self) -> u64 {
        self.progress.get(&0).unwrap().unwrap()
    }

    /// Does `work` after the program has begun. Returns true if the program has ended when `work`
    /// has.
    fn has_ended_after(&self, sandbox: &Sandbox, work: impl FnOnce()) -> bool {
        self.progress.set(&0, &0).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| sandbox.dial("127.0.0.1", 1));
            while self.progress() == 0 {
                std::hint::spin_loop();
            }
            work();
            self.progress() >> 32 == TIMES
        })
    }
}

const ROUNDS: u32 = 10;

#[test]
fn a_wait_is_for_programs_that_run() {
    let Some(sandbox) = Sandbox::new() else { return };
    let reader = SlowReader::new(&sandbox);
    // If another process has the other CPU, the program may be over whenever this thread looks.
    assert!(
        (0..100 * ROUNDS).any(|_| !reader.has_ended_after(&sandbox, || ())),
        "the program is too quick to prove anything"
    );
    let grace = GracePeriod::new().unwrap();
    assert!((0..ROUNDS).all(|_| reader.has_ended_after(&sandbox, || grace.wait().unwrap())));
}

/// Each round needs the slots that the round before last has given back.
#[test]
fn slots_are_given_out_again_after_a_grace_period() {
    let Some(sandbox) = Sandbox::new() else { return };
    let limits = Limits { slots: 2, ..sandbox.config.limits };
    let mut dataplane = sandbox.open_with(limits);
    let reader = SlowReader::new(&sandbox);
    for round in 1..=ROUNDS {
        let changed = shared([port("web", "10.96.0.1", vec![endpoint(&format!("10.0.0.{round}"), 80)])]);
        let apply = || {
            dataplane.apply(&change(changed)).unwrap();
        };
        assert!(reader.has_ended_after(&sandbox, apply) || round <= 2, "round {round}");
    }
}

#[test]
fn service_ids_are_given_out_again_after_a_grace_period() {
    let Some(sandbox) = Sandbox::new() else { return };
    let limits = Limits { services: 2, ..sandbox.config.limits };
    let mut dataplane = sandbox.open_with(limits);
    let reader = SlowReader::new(&sandbox);
    let service = |round: u32| port(&round.to_string(), &format!("10.96.0.{round}"), Vec::new());
    let mut waited = Vec::new();
    for round in 1..=ROUNDS {
        let changes = Changes {
            changed: shared([service(round)]),
            removed: (round > 1).then(|| service(round - 1).name).into_iter().collect(),
        };
        let apply = || {
            dataplane.apply(&changes).unwrap();
        };
        waited.push(reader.has_ended_after(&sandbox, apply));
    }
    // A wait gives both ids back, and the next round needs only one of them.
    assert!(waited[2..].windows(2).all(|two| two.contains(&true)), "{waited:?}");
}

#[test]
fn collecting_garbage_waits_for_a_grace_period() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let reader = SlowReader::new(&sandbox);
    for _ in 0..ROUNDS {
        let changed = shared([port("web", "10.96.0.1", vec![endpoint("10.0.0.1", 80)])]);
        dataplane.apply(&change(changed)).unwrap();
        let removed = vec![name("web", IpFamily::Ipv4)];
        dataplane.apply(&Changes { changed: Vec::new(), removed }).unwrap();
        assert!(reader.has_ended_after(&sandbox, || dataplane.collect_garbage().unwrap()));
    }
}
