//! Session affinity: a client's new connections go to the backend of its last one.

use crate::{
    balance::{Draw, HASH_FACTOR},
    family::{Family, Slot},
    layout::*,
    map_access::{AffinityEntry as _, AffinityMaps, Maps},
    port::Port,
    select::Origin,
};

impl<A: Address> Client<A> {
    pub const NODE: Self = Self { address: A::UNSPECIFIED, origin: CLIENT_NODE };

    #[inline(always)]
    pub fn new(origin: Origin, address: A) -> Self {
        match origin {
            Origin::Workload => Self { address, origin: CLIENT_WORKLOAD },
            Origin::Outside => Self { address, origin: CLIENT_OUTSIDE },
            Origin::Host => Self::NODE,
        }
    }
}

const SECOND: u64 = 1_000_000_000;

impl Affinity {
    /// Returns true if no new connection may use this affinity at `now`, in nanoseconds since boot.
    ///
    /// `seconds` is the length of affinity that the service has now; 0: it has none any more.
    #[inline(always)]
    pub const fn has_expired(&self, seconds: u32, now: u64) -> bool {
        now.saturating_sub(self.last_used) >= seconds as u64 * SECOND
    }

    #[inline(always)]
    fn to<S: Slot>(slot: &S, now: u64) -> Self {
        Self { last_used: now, backend: slot.backend(), flags: slot.flags() }
    }

    /// Returns random bits to choose anew with. All CPUs that find this affinity expired, or its
    /// backend out of the set, get the same bits, and so choose the same backend.
    #[inline(always)]
    const fn random(&self) -> u32 {
        // The multiplication spreads time stamps that are close to each other.
        (self.last_used.wrapping_mul(HASH_FACTOR) >> 32) as u32
    }
}

/// Returns the index of the slot that a new connection goes to. `set` is not empty.
// Not inlined: its stack would be added to the frame of its caller, and so to every other call from
// there.
#[inline(never)]
pub(crate) fn index<F: Family, T: AffinityMaps<F>>(
    maps: &T,
    set: EndpointSet,
    seconds: u32,
    key: &AffinityKey<F::Address>,
    draw: Draw,
) -> u32 {
    let mut known = maps.affinity(key);
    if known.is_none() {
        let chosen = draw.pick(maps, set);
        let Some(slot) = maps.slot(chosen) else { return chosen };
        if maps.remember(key, &Affinity::to(&slot, maps.now())) {
            return chosen;
        }
        // Another CPU has inserted an entry for this client first, or there is no memory.
        known = maps.affinity(key);
    }
    let Some(entry) = known else { return draw.pick(maps, set) };
    let (affinity, now) = (entry.read(), maps.now());
    if !affinity.has_expired(seconds, now) {
        let index = index_of(maps, set, affinity);
        if index != NOWHERE {
            entry.prolong(now);
            return index;
        }
    }
    let chosen = draw.again_by(affinity.random()).pick(maps, set);
    if let Some(slot) = maps.slot(chosen) {
        entry.write(Affinity::to(&slot, now));
    }
    chosen
}

/// The index that no slot has.
pub(crate) const NOWHERE: u32 = u32::MAX;

/// The number of halvings that find a slot in the largest endpoint set: `ebpf.limits.slots` is at
/// most 2^26.
const MOST_HALVINGS: u32 = 26;

/// Returns the index of the slot of the affinity's backend, or `NOWHERE` if the set has none that
/// takes new connections. Sets are sorted, so the search is binary.
#[inline(always)]
fn index_of<F: Family, T: AffinityMaps<F>>(maps: &T, set: EndpointSet, affinity: Affinity) -> u32 {
    let Some(backend) = maps.backend(affinity.backend) else { return NOWHERE };
    let wanted = F::Slot::new(backend.address, Port::new(backend.port), affinity.backend, affinity.flags);
    let index = last_up_to(maps, set, &wanted);
    match maps.slot(index) {
        Some(slot) if slot.backend() == affinity.backend && slot.flags() & BACKEND_DRAINING == 0 => index,
        Some(_) | None => NOWHERE,
    }
}

/// Returns the index of the last slot in this set that `wanted` does not precede, or of the first
/// slot if there is no such slot.
#[inline(always)]
pub(crate) fn last_up_to<F: Family>(maps: &impl Maps<F>, set: EndpointSet, wanted: &F::Slot) -> u32 {
    let (mut first, mut count) = (set.first, set.count());
    for _ in 0..MOST_HALVINGS {
        if count <= 1 {
            break;
        }
        let half = count / 2;
        let Some(slot) = maps.slot(first.wrapping_add(half)) else { return NOWHERE };
        if !wanted.precedes(&slot) {
            first = first.wrapping_add(half);
        }
        count -= half;
    }
    first
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{
        family::{V4, V6},
        map_access::host::HostMaps,
        reason::Reason,
        select::choose,
    };

    const SERVICE: u32 = 7;
    const SECONDS: u32 = 60;
    const CLIENT: Client<[u8; 4]> = Client { address: [203, 0, 113, 1], origin: CLIENT_OUTSIDE };
    const CLUSTER_IP: Frontend = Frontend { service: SERVICE, flags: 0 };
    const NODE_PORT: Frontend = Frontend { service: SERVICE, flags: FRONTEND_EXTERNAL };

    /// Backends 1 and 2 are local, 3 and 4 are not; 3 has the lowest address. Clients outside get
    /// only local ones.
    fn maps() -> HostMaps<V4> {
        let mut maps = HostMaps::default();
        set_endpoints(&mut maps, &[(1, BACKEND_LOCAL), (2, BACKEND_LOCAL), (3, 0), (4, 0)]);
        maps
    }

    fn address(backend: u32) -> [u8; 4] {
        [10, 244, u8::from(backend != 3), backend as u8]
    }

    fn set_endpoints(maps: &mut HostMaps<V4>, endpoints: &[(u32, u32)]) {
        maps.slots.clear();
        for (index, (id, flags)) in (100..).zip(endpoints) {
            maps.slots.insert(index, Slot4::new(address(*id), Port::new(80), *id, *flags));
            let backend = Backend { address: address(*id), port: 80, ..Backend::default() };
            maps.backends.insert(*id, backend);
        }
        let local = endpoints.iter().filter(|(_, flags)| *flags != 0).count() as u32;
        let all = EndpointSet::new(100, endpoints.len() as u32);
        let service = Service {
            cluster: all,
            internal: all,
            external: EndpointSet::new(100, local),
            flags: SERVICE_HAS_ENDPOINTS,
            affinity_seconds: SECONDS,
        };
        maps.services.insert(SERVICE, service);
    }

    fn pass(maps: &HostMaps<V4>, seconds: u64) {
        maps.clock.set(maps.clock.get() + seconds * SECOND);
    }

    /// Returns random bits that choose one of four slots.
    fn dice(index: u32) -> u32 {
        index << 30
    }

    fn go(maps: &HostMaps<V4>, frontend: Frontend, client: Client<[u8; 4]>, random: u32) -> u32 {
        let key = AffinityKey { service: SERVICE, client };
        choose(maps, frontend, true, &key, Draw::random(random)).unwrap().backend
    }

    fn go_from_outside(maps: &HostMaps<V4>, random: u32) -> Result<u32, Reason> {
        let key = AffinityKey { service: SERVICE, client: CLIENT };
        choose(maps, NODE_PORT, false, &key, Draw::random(random)).map(|slot| slot.backend)
    }

    /// Every node draws alike, because it knows no client at first.
    #[test]
    fn a_fixed_draw_chooses_alike_when_affinity_is_over() {
        let maps = maps();
        let key = AffinityKey { service: SERVICE, client: CLIENT };
        for index in [2, 0, 3] {
            for _ in 0..2 {
                let chosen = choose(&maps, CLUSTER_IP, true, &key, Draw::fixed(dice(index))).unwrap();
                assert_eq!(chosen.backend, index + 1);
            }
            pass(&maps, SECONDS.into());
        }
    }

    #[rstest]
    fn a_client_stays(#[values(0, 1, 2, 3)] first: u32, #[values(0, 1, 2, 3)] then: u32) {
        let maps = maps();
        let backend = go(&maps, CLUSTER_IP, CLIENT, dice(first));
        assert_eq!(backend, first + 1);
        assert_eq!(go(&maps, CLUSTER_IP, CLIENT, dice(then)), backend);
        assert_eq!(go(&maps, NODE_PORT, CLIENT, dice(then)), backend, "all frontends share it");
        let others = AffinityKey { service: SERVICE + 1, client: CLIENT };
        assert!(maps.affinity(&others).is_none(), "service ports do not");
    }

    #[test]
    fn clients_are_told_apart() {
        let maps = maps();
        let clients = [
            Client::new(Origin::Outside, [203, 0, 113, 1]),
            Client::new(Origin::Outside, [203, 0, 113, 2]),
            Client::new(Origin::Workload, [203, 0, 113, 1]),
            Client::NODE,
        ];
        for (client, index) in clients.into_iter().zip([3, 2, 1, 0]) {
            assert_eq!(go(&maps, CLUSTER_IP, client, dice(index)), index + 1);
        }
        let forged = Client::new(Origin::Outside, [0; 4]);
        assert_eq!(go(&maps, CLUSTER_IP, forged, dice(1)), 2);
        assert_eq!(Client::new(Origin::Host, [192, 0, 2, 1]), Client::NODE, "the node is one client");
    }

    #[test]
    fn nothing_is_remembered_without_affinity() {
        let mut maps = maps();
        maps.services.get_mut(&SERVICE).unwrap().affinity_seconds = 0;
        assert_eq!(go(&maps, CLUSTER_IP, CLIENT, dice(0)), 1);
        assert_eq!(go(&maps, CLUSTER_IP, CLIENT, dice(1)), 2);
        assert!(maps.affinity.borrow().is_empty());
    }

    #[test]
    fn each_connection_prolongs_it() {
        let maps = maps();
        let backend = go(&maps, CLUSTER_IP, CLIENT, dice(2));
        for _ in 0..5 {
            pass(&maps, u64::from(SECONDS) - 1);
            assert_eq!(go(&maps, CLUSTER_IP, CLIENT, dice(0)), backend);
        }
    }

    #[test]
    fn an_expired_client_chooses_by_chance() {
        let mut met = [0; 4];
        for nanosecond in 0..400 {
            let maps = maps();
            maps.clock.set(maps.clock.get() + nanosecond);
            go(&maps, CLUSTER_IP, CLIENT, dice(0));
            pass(&maps, u64::from(SECONDS));
            let backend = go(&maps, CLUSTER_IP, CLIENT, dice(0));
            met[backend as usize - 1] += 1;
            assert_eq!(go(&maps, CLUSTER_IP, CLIENT, dice(0)), backend, "that is remembered");
        }
        assert!(met.iter().all(|count| (80..=120).contains(count)), "{met:?}");
    }

    #[rstest]
    #[case::another_one_goes(3, &[(1, BACKEND_LOCAL), (2, BACKEND_LOCAL), (3, 0)], true)]
    #[case::one_comes_before_it(2, &[(1, BACKEND_LOCAL), (2, BACKEND_LOCAL), (5, BACKEND_LOCAL), (3, 0)], true)]
    #[case::all_others_go(4, &[(4, 0)], true)]
    #[case::it_goes(4, &[(1, BACKEND_LOCAL), (2, BACKEND_LOCAL), (3, 0)], false)]
    #[case::only_another_is_left(4, &[(1, BACKEND_LOCAL)], false)]
    #[case::it_is_elsewhere_now(2, &[(1, BACKEND_LOCAL), (3, 0), (2, 0)], false)]
    fn when_endpoints_change(#[case] backend: u32, #[case] endpoints: &[(u32, u32)], #[case] stays: bool) {
        let mut maps = maps();
        assert_eq!(go(&maps, CLUSTER_IP, CLIENT, dice(backend - 1)), backend);
        // The backends that leave the set stay in the map, because another service may use them.
        set_endpoints(&mut maps, endpoints);
        let now = go(&maps, CLUSTER_IP, CLIENT, 0);
        assert!(endpoints.iter().any(|(id, _)| *id == now));
        assert!(now == backend || !stays);
        let key = AffinityKey { service: SERVICE, client: CLIENT };
        let remembered = maps.affinity(&key).unwrap().read();
        assert_eq!((remembered.backend, remembered.last_used), (now, maps.now()));
    }

    #[test]
    fn a_client_leaves_an_endpoint_that_only_other_nodes_may_send_to() {
        let mut maps = maps();
        assert_eq!(go(&maps, CLUSTER_IP, CLIENT, dice(1)), 2);
        set_endpoints(&mut maps, &[(1, BACKEND_LOCAL), (2, BACKEND_LOCAL | BACKEND_DRAINING), (3, 0)]);
        let now = go(&maps, CLUSTER_IP, CLIENT, 0);
        assert_ne!(now, 2);
        set_endpoints(&mut maps, &[(1, BACKEND_LOCAL), (2, BACKEND_LOCAL), (3, 0)]);
        assert_eq!(go(&maps, CLUSTER_IP, CLIENT, dice(1)), now);
    }

    #[test]
    fn a_client_outside_is_kept_out_of_remote_endpoints_by_policy_local() {
        let mut maps = maps();
        let backend = go(&maps, NODE_PORT, CLIENT, dice(3));
        assert_eq!(backend, 4, "from inside, every endpoint is used");
        let local = go_from_outside(&maps, 0).unwrap();
        assert!(local <= 2);
        assert_eq!(go_from_outside(&maps, u32::MAX), Ok(local));
        assert_eq!(go(&maps, CLUSTER_IP, CLIENT, dice(3)), local, "which is one for clients inside too");
        set_endpoints(&mut maps, &[(3, 0), (4, 0)]);
        assert_eq!(go_from_outside(&maps, 0), Err(Reason::NoLocalEndpoints));
    }

    #[test]
    fn every_index_of_a_set_is_found_and_no_other() {
        for count in 1..=70_u32 {
            let mut maps = HostMaps::<V6>::default();
            let set = EndpointSet::new(1_000, count);
            // The first slot and the last one belong to other sets.
            for n in 0..count + 2 {
                let (flags, port) = (BACKEND_LOCAL * u32::from(n < count / 3), 80 + (n % 2) as u16);
                let mut address = [0; 16];
                address[15] = (n / 2) as u8;
                maps.slots.insert(999 + n, Slot6::new(address, Port::new(port), n + 1, flags));
                maps.backends.insert(n + 1, Backend { address, port, ..Backend::default() });
            }
            for n in 0..count + 2 {
                let flags = maps.slot(999 + n).unwrap().flags;
                let affinity = Affinity { last_used: 0, backend: n + 1, flags };
                let expected = if (1..=count).contains(&n) { 999 + n } else { NOWHERE };
                assert_eq!(index_of::<V6, _>(&maps, set, affinity), expected, "{n} of {count}");
                maps.backends.remove(&(n + 1));
                assert_eq!(index_of::<V6, _>(&maps, set, affinity), NOWHERE);
            }
        }
    }
}
