use rstest::rstest;

use super::*;
use crate::{
    model::objects::TrafficPolicy,
    modes::userspace::test_support::{changed_web, host, web},
};

const A: &str = "10.0.0.1:8080";
const B: &str = "10.0.0.2:8080";
const C: &str = "10.0.0.3:8080";

fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn client(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn balancer(endpoints: &[&str]) -> Balancer {
    Balancer::new(&web(endpoints, TrafficPolicy::Cluster), &host(), 0)
}

fn sticky(endpoints: &[&str], seconds: u32) -> Arc<DesiredPort> {
    changed_web(endpoints, |service| service.affinity_seconds = Some(seconds))
}

#[rstest]
#[case::one(&[A], &[A, A, A])]
#[case::each_in_turn(&[A, B, C], &[A, B, C, A, B])]
fn round_robin(#[case] endpoints: &[&str], #[case] expected: &[&str]) {
    let mut balancer = balancer(endpoints);
    let now = Instant::now();
    let mut choose = || balancer.choose(Entrance::ClusterIp, client("10.244.0.9"), &[], now).unwrap();
    let chosen: Vec<_> = expected.iter().map(|_| choose()).collect();
    assert_eq!(chosen, addresses(expected));
}

#[rstest]
#[case::the_next(&[A, B, C], &[A], B)]
#[case::the_one_that_is_left(&[A, B, C], &[A, B], C)]
#[case::all_have_failed(&[A, B], &[A, B], A)]
#[case::there_is_one_only(&[A], &[A], A)]
fn after_failures(#[case] endpoints: &[&str], #[case] tried: &[&str], #[case] expected: &str) {
    let mut balancer = balancer(endpoints);
    let chosen =
        balancer.choose(Entrance::ClusterIp, client("10.244.0.9"), &addresses(tried), Instant::now());
    assert_eq!(chosen, Ok(expected.parse().unwrap()));
}

#[test]
fn a_change_of_endpoints_keeps_whose_turn_it_is() {
    let mut balancer = balancer(&[A, B, C]);
    let now = Instant::now();
    let choose =
        |balancer: &mut Balancer| balancer.choose(Entrance::ClusterIp, client("10.244.0.9"), &[], now);
    assert_eq!(choose(&mut balancer), Ok(A.parse().unwrap()));
    balancer.update(&web(&[A, B], TrafficPolicy::Cluster), &host());
    assert_eq!(choose(&mut balancer), Ok(B.parse().unwrap()));
    balancer.update(&web(&[], TrafficPolicy::Cluster), &host());
    assert_eq!(choose(&mut balancer), Err(Refusal::NoEndpoint));
    assert!(!balancer.has(A.parse().unwrap()));
}

#[rstest]
#[case::at_once(0, Entrance::ClusterIp, true)]
#[case::by_another_frontend(0, Entrance::External, true)]
#[case::at_the_last_moment(10, Entrance::ClusterIp, true)]
#[case::too_late(11, Entrance::ClusterIp, false)]
fn affinity_lasts(#[case] seconds_later: u64, #[case] entrance: Entrance, #[case] same: bool) {
    let mut balancer = Balancer::new(&sticky(&[A, B], 10), &host(), 0);
    let now = Instant::now();
    // After the first choice it is the other endpoint's turn in each set.
    balancer.sets[index(EndpointSet::External)].next = 1;
    let first = balancer.choose(Entrance::ClusterIp, client("10.244.0.9"), &[], now);
    let later = now + Duration::from_secs(seconds_later);
    let second = balancer.choose(entrance, client("10.244.0.9"), &[], later);
    assert_eq!(first == second, same);
}

#[test]
fn each_connection_begins_the_affinity_anew() {
    let mut balancer = Balancer::new(&sticky(&[A, B], 10), &host(), 0);
    let now = Instant::now();
    for seconds in [0, 8, 16, 24] {
        let at = now + Duration::from_secs(seconds);
        let chosen = balancer.choose(Entrance::ClusterIp, client("10.244.0.9"), &[], at);
        assert_eq!(chosen, Ok(A.parse().unwrap()), "after {seconds} s");
    }
}

#[test]
fn affinity_moves_to_the_endpoint_that_answers() {
    let mut balancer = Balancer::new(&sticky(&[A, B], 10), &host(), 0);
    let now = Instant::now();
    let mut choose = |tried: &[&str]| {
        balancer.choose(Entrance::ClusterIp, client("10.244.0.9"), &addresses(tried), now).unwrap()
    };
    assert_eq!(choose(&[]), A.parse().unwrap());
    assert_eq!(choose(&[A]), B.parse().unwrap());
    assert_eq!(choose(&[]), B.parse().unwrap());
}

#[test]
fn affinity_ends_with_its_endpoint_and_survives_other_changes() {
    let mut balancer = Balancer::new(&sticky(&[A, B], 10), &host(), 1);
    let now = Instant::now();
    let choose =
        |balancer: &mut Balancer| balancer.choose(Entrance::ClusterIp, client("10.244.0.9"), &[], now);
    assert_eq!(choose(&mut balancer), Ok(B.parse().unwrap()));
    balancer.update(&sticky(&[A, B, C], 10), &host());
    assert_eq!(choose(&mut balancer), Ok(B.parse().unwrap()));
    balancer.update(&sticky(&[A], 10), &host());
    assert_eq!(choose(&mut balancer), Ok(A.parse().unwrap()));
}

#[test]
fn no_more_clients_are_remembered_than_there_is_room_for_and_none_for_ever() {
    let mut balancer = Balancer::new(&sticky(&[A, B], 10), &host(), 0);
    let now = Instant::now();
    for number in 0..=MOST_REMEMBERED as u32 {
        let client = std::net::Ipv4Addr::from_bits(number).into();
        balancer.choose(Entrance::ClusterIp, client, &[], now).unwrap();
    }
    let remembered = |balancer: &Balancer| balancer.affinity.as_ref().unwrap().remembered.len();
    assert_eq!(remembered(&balancer), MOST_REMEMBERED);
    balancer.forget_expired(now + Duration::from_secs(10));
    assert_eq!(remembered(&balancer), MOST_REMEMBERED);
    balancer.forget_expired(now + Duration::from_secs(11));
    assert_eq!(remembered(&balancer), 0);
}

#[rstest]
#[case::in_a_range(Entrance::LoadBalancer, "198.51.100.7", Ok(()))]
#[case::in_none(Entrance::LoadBalancer, "203.0.113.7", Err(Refusal::SourceRanges))]
#[case::ranges_are_for_load_balancer_addresses(Entrance::External, "203.0.113.7", Ok(()))]
fn source_ranges(#[case] entrance: Entrance, #[case] from: &str, #[case] expected: Result<(), Refusal>) {
    let port = changed_web(&[A], |service| {
        service.source_ranges = vec!["198.51.100.0/24".parse().unwrap()];
    });
    let mut balancer = Balancer::new(&port, &host(), 0);
    let found = balancer.choose(entrance, client(from), &[], Instant::now()).map(drop);
    assert_eq!(found, expected);
}

#[rstest]
#[case::outside("203.0.113.7", Err(Refusal::NoEndpoint))]
#[case::a_pod("10.244.0.9", Ok(()))]
#[case::the_node("192.0.2.1", Ok(()))]
#[case::the_node_by_loopback("127.0.0.1", Ok(()))]
fn external_policy_local_without_local_endpoint(#[case] from: &str, #[case] expected: Result<(), Refusal>) {
    let mut balancer = Balancer::new(&web(&[A], TrafficPolicy::Local), &host(), 0);
    let found = balancer.choose(Entrance::External, client(from), &[], Instant::now()).map(drop);
    assert_eq!(found, expected);
}
