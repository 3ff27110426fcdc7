mod fakes;

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Mutex, PoisonError},
};

use rstest::rstest;

use self::fakes::{Fake, FakeSecondary, Log, SHARE};
use super::*;
use crate::{
    model::{
        Model,
        desired::FrontendKind,
        objects::{IpFamily, ObjectName, Protocol, Service},
        test_support::{port, service},
    },
    modes::{ErrorKind, FrontendSnapshot, ServiceSnapshot},
};

struct Scene {
    both: WithSecondary,
    model: Model,
    log: Log,
    fails: Arc<Mutex<bool>>,
    /// The destinations that clients of established connections have dialled.
    connections: Arc<Mutex<Vec<SocketAddr>>>,
    is_incomplete: Arc<Mutex<bool>>,
    is_secondary_incomplete: Arc<Mutex<bool>>,
    lacks_programs: Arc<Mutex<bool>>,
    programs_come_later: Arc<Mutex<bool>>,
    asked: Arc<Mutex<usize>>,
}

impl Scene {
    /// Returns a scene in which nothing is served yet.
    fn new() -> Self {
        let (log, fails, connections) = (Log::default(), Arc::default(), Arc::default());
        let (is_incomplete, is_secondary_incomplete) = Default::default();
        let (lacks_programs, programs_come_later, asked) = Default::default();
        let active = Box::new(Fake {
            who: "own",
            log: log.clone(),
            is_incomplete: Arc::clone(&is_incomplete),
            lacks_programs: Arc::clone(&lacks_programs),
            programs_come_later: Arc::clone(&programs_come_later),
            asked: Arc::clone(&asked),
            shares_frontends: false,
        });
        let secondary = FakeSecondary {
            log: log.clone(),
            fails: Arc::clone(&fails),
            is_incomplete: Arc::clone(&is_secondary_incomplete),
            connections: Arc::clone(&connections),
        };
        let mut both = WithSecondary::new(active, Box::new(secondary));
        both.set_host(&Host::default()).unwrap();
        both.resync(&[]).unwrap();
        log.take();
        let model = Model::new("node");
        Self {
            both,
            model,
            log,
            fails,
            connections,
            is_incomplete,
            is_secondary_incomplete,
            lacks_programs,
            programs_come_later,
            asked,
        }
    }

    fn apply(&mut self, service: Service) -> Vec<String> {
        self.model.apply_service(service);
        self.write()
    }

    fn connect_to(&self, dialled: &str) {
        self.connections.lock().unwrap().push(dialled.parse().unwrap());
    }

    /// Takes the packet programs from an interface, or gives all interfaces programs. Then calls
    /// `collect_garbage` once a second for this many seconds, and returns the calls that the two
    /// modes got.
    fn lack(&mut self, lacks_programs: bool, seconds: u32) -> Vec<String> {
        *self.lacks_programs.lock().unwrap() = lacks_programs;
        (0..seconds).for_each(|_| self.both.collect_garbage().unwrap());
        self.log.take()
    }

    fn write(&mut self) -> Vec<String> {
        self.both.apply(&self.model.take_changes()).unwrap();
        self.log.take()
    }
}

/// Returns a Service with a load-balancer address.
fn web() -> Service {
    service("default/web", &["10.96.0.1"]).load_balancer_ip("203.0.113.1")
}

fn with_node_port() -> Service {
    let mut web = service("default/web", &["10.96.0.1"]);
    web.ports[0].node_port = Some(30_080);
    web
}

/// The address at which clients reach [`sctp`].
const SCTP: &str = "10.96.0.2:80";

fn sctp() -> Service {
    let mut sctp = service("default/sctp", &["10.96.0.2"]);
    sctp.ports[0].protocol = Protocol::Sctp;
    sctp
}

#[rstest]
#[case::nothing(web(), &["own web:cl"])]
#[case::everything(sctp(), &["open", "secondary host that is shared", "secondary all sctp:c", "own -sctp"])]
#[case::frontends_that_processes_of_the_node_do_not_reach(
    with_node_port(),
    &["open", "secondary host that is shared", "secondary all web:n", "own web:cn"],
)]
#[case::what_is_served_differently_stays(
    Service { affinity_seconds: Some(5), ..web() },
    &["own web:cl"],
)]
fn what_the_active_mode_cannot_serve_is_delegated(#[case] service: Service, #[case] expected: &[&str]) {
    assert_eq!(Scene::new().apply(service), expected);
}

#[test]
fn a_service_port_is_served_on_both_sides_rather_than_on_none_while_it_passes_over() {
    let mut scene = Scene::new();
    scene.apply(sctp());
    assert_eq!(scene.apply(with_node_port()), ["secondary web:n", "own web:cn"]);
    assert_eq!(scene.apply(web()), ["own web:cl", "secondary -web"]);
    assert_eq!(scene.apply(with_node_port()), ["secondary web:n", "own web:cn"]);
}

#[test]
fn what_the_secondary_mode_serves_already_is_written_to_the_active_mode_first() {
    let node_port =
        |number| service("default/web", &["10.96.0.1"]).ports(vec![port("http", 80).node_port(number)]);
    let mut scene = Scene::new();
    scene.apply(node_port(30_080));
    let again = node_port(30_080).external_ip("203.0.113.7");
    assert_eq!(scene.apply(again), ["own web:cne", "secondary web:n"]);
    assert_eq!(scene.apply(node_port(30_081)), ["secondary web:n", "own web:cn"]);
}

/// A predecessor in the secondary mode has left rules for everything. They are removed with the
/// first write to that mode, which comes after the active mode serves.
#[test]
fn what_a_predecessor_has_left_of_the_secondary_mode_serves_until_the_active_mode_does() {
    let mut scene = Scene::new();
    scene.model.apply_service(with_node_port());
    let resync = |scene: &mut Scene| {
        scene.model.take_changes();
        scene.both.resync(&scene.model.desired()).unwrap();
        scene.log.take()
    };
    let expected = ["own all web:cn", "open", "secondary host that is shared", "secondary all web:n"];
    assert_eq!(resync(&mut scene), expected);
    assert_eq!(resync(&mut scene), ["own all web:cn", "secondary all web:n"]);
    scene.model.apply_service(sctp());
    assert_eq!(resync(&mut scene), ["secondary sctp:c", "own all web:cn", "secondary all sctp:c web:n"]);
}

#[test]
fn the_secondary_mode_serves_where_the_active_mode_could_not_write_everything() {
    let mut scene = Scene::new();
    scene.model.apply_service(with_node_port());
    scene.model.take_changes();
    *scene.is_incomplete.lock().unwrap() = true;
    assert!(scene.both.resync(&scene.model.desired()).is_err());
    assert_eq!(
        scene.log.take(),
        ["own all web:cn", "open", "secondary host that is shared", "secondary all web:n"]
    );
}

#[test]
fn the_secondary_mode_is_removed_after_the_last_port() {
    let mut scene = Scene::new();
    scene.apply(sctp());
    scene.model.delete_service(&sctp().name);
    assert_eq!(scene.write(), ["own -sctp", "secondary -sctp", "remove"]);
    assert_eq!(
        scene.apply(sctp()),
        ["open", "secondary host that is shared", "secondary all sctp:c", "own -sctp"]
    );
    scene.both.resync(&[]).unwrap();
    assert_eq!(scene.log.take(), ["own all ", "secondary all ", "remove"]);
}

#[test]
fn the_secondary_mode_goes_on_translating_its_connections() {
    let mut scene = Scene::new();
    scene.apply(sctp());
    scene.connect_to(SCTP);
    scene.model.delete_service(&sctp().name);
    assert_eq!(scene.write(), ["own -sctp", "secondary -sctp"]);
    assert_eq!(scene.apply(sctp()), ["secondary sctp:c", "own -sctp"], "it is still there");
    scene.model.delete_service(&sctp().name);
    assert_eq!(scene.write(), ["own -sctp", "secondary -sctp"]);
    let mut collect = |times| (0..times).for_each(|_| scene.both.collect_garbage().unwrap());
    collect(2 * COLLECTIONS_BETWEEN_REMOVALS);
    assert_eq!(scene.log.take(), [""; 0]);
    scene.connections.lock().unwrap().clear();
    collect(COLLECTIONS_BETWEEN_REMOVALS);
    assert_eq!(scene.log.take(), ["remove"]);
}

#[rstest]
#[case::what_was_delegated(SCTP, true)]
#[case::a_node_port_that_was_delegated("192.0.2.1:30080", true)]
#[case::a_service_that_a_former_proxy_has_served("10.96.0.7:80", true)]
#[case::a_port_that_a_container_engine_publishes("192.0.2.1:8080", false)]
#[case::the_same_port_as_a_node_port_of_another_machine("198.51.100.1:30080", false)]
fn only_connections_to_services_keep_the_secondary_mode(#[case] dialled: &str, #[case] stays: bool) {
    let mut scene = Scene::new();
    let host = Host { node_port_addresses: ["192.0.2.1".parse().unwrap()].into(), ..Host::default() };
    scene.both.set_host(&host).unwrap();
    scene.apply(sctp());
    scene.apply(with_node_port());
    scene.connect_to(dialled);
    scene.model.delete_service(&sctp().name);
    scene.model.delete_service(&with_node_port().name);
    scene.write();
    scene.both.collect_garbage().unwrap();
    assert_eq!(scene.both.opened.is_some(), stays);
}

/// The switch failed after the secondary mode had been released: the new mode could not take over.
#[test]
fn an_idle_secondary_mode_that_was_released_for_a_switch_that_failed_is_taken_back() {
    let mut scene = Scene::new();
    scene.apply(sctp());
    scene.connect_to(SCTP);
    scene.model.delete_service(&sctp().name);
    scene.write();
    scene.both.invalidate(Known::OfSecondaryMode);
    scene.both.resync(&[]).unwrap();
    assert_eq!(scene.log.take(), ["own all ", "open", "secondary host that is shared", "secondary all "]);
    scene.connections.lock().unwrap().clear();
    (0..COLLECTIONS_BETWEEN_REMOVALS).for_each(|_| scene.both.collect_garbage().unwrap());
    assert_eq!(scene.log.take(), ["remove"]);
}

#[test]
fn a_secondary_mode_that_could_not_be_taken_back_is_tried_again() {
    let mut scene = Scene::new();
    scene.apply(sctp());
    scene.connect_to(SCTP);
    scene.model.delete_service(&sctp().name);
    scene.write();
    scene.both.invalidate(Known::OfSecondaryMode);
    *scene.fails.lock().unwrap() = true;
    scene.both.resync(&[]).unwrap();
    assert_eq!(scene.log.take(), ["own all "]);
    *scene.fails.lock().unwrap() = false;
    scene.both.resync(&[]).unwrap();
    assert!(scene.log.take().contains(&"open".to_owned()));
}

/// A service port that is no longer desired must not send clients to old endpoints.
#[test]
fn what_is_not_desired_any_more_leaves_the_secondary_mode_whatever_the_active_mode_could_not_write() {
    let mut scene = Scene::new();
    scene.apply(sctp());
    scene.connect_to(SCTP);
    *scene.is_incomplete.lock().unwrap() = true;
    assert!(scene.both.resync(&[]).is_err());
    assert_eq!(scene.log.take(), ["own all ", "secondary all "]);
    scene.connections.lock().unwrap().clear();
    assert!(scene.both.resync(&[]).is_err());
    assert_eq!(scene.log.take(), ["own all ", "secondary all ", "remove"]);
}

#[rstest]
#[case::that_was_compared(false)]
#[case::that_has_changed(true)]
fn the_secondary_mode_serves_a_service_port_until_the_active_mode_has_written_it(#[case] by_change: bool) {
    let mut scene = Scene::new();
    scene.apply(with_node_port());
    *scene.is_incomplete.lock().unwrap() = true;
    scene.model.apply_service(web());
    let changes = scene.model.take_changes();
    if by_change {
        assert!(scene.both.apply(&changes).is_err());
        scene.log.take();
    }
    let desired = scene.model.desired();
    assert!(scene.both.resync(&desired).is_err());
    assert_eq!(scene.log.take(), ["own all web:cl", "secondary all web:n"]);
    *scene.is_incomplete.lock().unwrap() = false;
    scene.apply(service("default/other", &["10.96.0.9"]));
    scene.both.resync(&scene.model.desired()).unwrap();
    assert_eq!(scene.log.take(), ["own all other:c web:cl", "secondary all ", "remove"]);
}

#[test]
fn what_is_delegated_is_told_and_no_reason_to_keep_another_kube_proxys_rules() {
    let mut scene = Scene::new();
    scene.model.apply_service(with_node_port());
    let port = Arc::clone(&scene.model.take_changes().changed[0]);
    let [told] = scene.both.unserved_fields(&port).try_into().unwrap();
    assert_eq!(told.effect, Effect::Delegated);
    assert_eq!(told.instead, "served by the secondary mode nftables");
    assert!(!told.leaves_unserved());
}

/// The service ports of the active mode are served even if the secondary mode cannot be opened.
#[test]
fn a_secondary_mode_that_cannot_be_opened_is_told_by_service_port_and_tried_again() {
    let mut scene = Scene::new();
    *scene.fails.lock().unwrap() = true;
    assert_eq!(scene.both.inspection_share(), SHARE);
    assert_eq!(scene.apply(with_node_port()), ["own web:cn"]);
    assert_eq!(scene.both.inspection_share(), 0, "it is tried again soon");
    let told = scene.both.take_waiting().unwrap();
    let [(name, reasons)] = Vec::from_iter(told).try_into().unwrap();
    assert_eq!(name.service, with_node_port().name);
    assert!(reasons[0].instead.ends_with("cannot be opened: no nf_tables"), "{reasons:?}");
    assert!(reasons[0].may_be_served_by_another());
    assert_eq!(scene.both.take_waiting(), None, "nothing has changed");

    *scene.fails.lock().unwrap() = false;
    scene.both.resync(&scene.model.desired()).unwrap();
    assert_eq!(
        scene.log.take(),
        ["own all web:cn", "open", "secondary host that is shared", "secondary all web:n"]
    );
    assert_eq!(scene.both.take_waiting(), Some(BTreeMap::new()));
    assert_eq!(scene.both.inspection_share(), 0, "others write netfilter's rules too");
}

fn api() -> Service {
    service("default/api", &["10.96.0.3"])
}

#[test]
fn everything_is_served_by_both_while_a_pod_has_no_packet_programs() {
    let mut scene = Scene::new();
    scene.apply(web());
    scene.apply(with_node_port());
    assert_eq!(scene.apply(web()), ["own web:cl", "secondary -web", "remove"]);
    let opened = ["open", "secondary host that is shared", "secondary all web:cl"];
    let opened = [&["own frontends are shared"], &opened[..]].concat();
    assert_eq!(scene.lack(true, 3), opened, "the active mode learns it first");
    assert_eq!(scene.apply(api()), ["own api:c", "secondary api:c"], "the faster one first");
    let again = Service { affinity_seconds: Some(5), ..api() };
    assert_eq!(scene.apply(again), ["own api:c", "secondary api:c"]);
    assert_eq!(scene.apply(sctp()), ["secondary sctp:c", "own -sctp"]);
    scene.both.resync(&scene.model.desired()).unwrap();
    let everything = ["own all api:c web:cl", "secondary all api:c sctp:c web:cl"];
    assert_eq!(scene.log.take(), everything);
    scene.model.delete_service(&api().name);
    assert_eq!(scene.write(), ["own -api", "secondary -api"]);
    // Another pod without programs appears one second before everything would be taken back from
    // the secondary mode. So nothing is written.
    assert_eq!(scene.lack(false, COLLECTIONS_BETWEEN_REMOVALS - 1), [""; 0]);
    assert_eq!(scene.lack(true, 1), [""; 0]);
    let alone = ["secondary -web", "own frontends are its own"];
    assert_eq!(scene.lack(false, COLLECTIONS_BETWEEN_REMOVALS), alone, "SCTP stays");
    scene.model.delete_service(&sctp().name);
    assert_eq!(scene.write(), ["own -sctp", "secondary -sctp", "remove"]);
}

#[test]
fn connections_of_a_pod_that_had_no_packet_programs_go_on() {
    let mut scene = Scene::new();
    scene.apply(web());
    scene.lack(true, 1);
    scene.connect_to("10.96.0.1:80");
    let after_the_pause = 3 * COLLECTIONS_BETWEEN_REMOVALS;
    let after = ["secondary -web", "own frontends are its own"];
    assert_eq!(scene.lack(false, after_the_pause), after, "the secondary mode is still there");
    scene.connections.lock().unwrap().clear();
    assert_eq!(scene.lack(false, COLLECTIONS_BETWEEN_REMOVALS), ["remove"]);
}

#[test]
fn a_lack_that_is_known_before_services_are_written_delegates_with_them() {
    let mut scene = Scene::new();
    scene.both.is_synced = false;
    *scene.lacks_programs.lock().unwrap() = true;
    scene.both.set_host(&Host::default()).unwrap();
    assert_eq!(scene.log.take(), ["own host", "own frontends are shared"]);
    scene.model.apply_service(web());
    scene.model.take_changes();
    scene.both.resync(&scene.model.desired()).unwrap();
    let expected = ["own all web:cl", "open", "secondary host that is shared", "secondary all web:cl"];
    assert_eq!(scene.log.take(), expected);
}

#[test]
fn an_interface_without_programs_is_told_with_who_serves_its_pod() {
    let mut scene = Scene::new();
    scene.apply(web());
    *scene.fails.lock().unwrap() = true;
    scene.lack(true, 1);
    let told = |scene: &mut Scene| scene.both.hook_problems().unattached[&7].clone();
    let failed = "it is full; the secondary mode nftables, which would serve its pod where socket hooks do not, cannot be opened: no nf_tables";
    assert_eq!(told(&mut scene), failed);
    assert_eq!(scene.both.take_waiting(), Some(BTreeMap::new()), "the Service itself is served");
    *scene.fails.lock().unwrap() = false;
    scene.both.resync(&scene.model.desired()).unwrap();
    assert_eq!(
        told(&mut scene),
        "it is full; the secondary mode nftables serves its pod where socket hooks do not"
    );
}

#[test]
fn what_the_secondary_mode_could_not_write_for_such_a_pod_is_written_again() {
    let mut scene = Scene::new();
    scene.apply(web());
    *scene.is_secondary_incomplete.lock().unwrap() = true;
    *scene.lacks_programs.lock().unwrap() = true;
    assert!(scene.both.collect_garbage().is_err());
    scene.log.take();
    *scene.is_secondary_incomplete.lock().unwrap() = false;
    assert_eq!(scene.lack(true, 2), ["secondary all web:cl"], "once");
}

/// A connection that netfilter has translated breaks if a packet program translates one of its
/// segments, such as a repeated SYN. So netfilter gets no rule for what the programs will serve
/// until they are attached. What they never serve is served at once.
#[test]
fn the_secondary_mode_gets_what_packet_programs_serve_after_they_are_attached() {
    let mut scene = Scene::new();
    *scene.programs_come_later.lock().unwrap() = true;
    scene.both.set_host(&Host::default()).unwrap();
    scene.model.apply_service(with_node_port());
    scene.model.apply_service(sctp());
    scene.both.resync(&scene.model.take_changes().changed).unwrap();
    let before =
        ["own host", "own all web:cn", "open", "secondary host that is shared", "secondary all sctp:c"];
    assert_eq!(scene.log.take(), before);
    scene.both.attach().unwrap();
    assert_eq!(scene.log.take(), ["own attached", "secondary web:n"]);
    scene.both.attach().unwrap();
    assert_eq!(scene.log.take(), [""; 0], "nothing comes later any more");
}

#[test]
fn programs_that_come_later_and_lack_for_some_pods_have_each_port_looked_at_once() {
    let mut scene = Scene::new();
    *scene.programs_come_later.lock().unwrap() = true;
    scene.both.set_host(&Host::default()).unwrap();
    scene.model.apply_service(with_node_port());
    scene.both.resync(&scene.model.take_changes().changed).unwrap();
    *scene.lacks_programs.lock().unwrap() = true;
    (*scene.asked.lock().unwrap(), _) = (0, scene.log.take());
    scene.both.attach().unwrap();
    let written = [
        "own attached",
        "own frontends are shared",
        "open",
        "secondary host that is shared",
        "secondary all web:cn",
    ];
    assert_eq!(scene.log.take(), written);
    assert_eq!(*scene.asked.lock().unwrap(), 1);
}

#[test]
fn a_secondary_mode_that_serves_keeps_its_rules_while_programs_are_attached_anew() {
    let mut scene = Scene::new();
    scene.apply(with_node_port());
    *scene.programs_come_later.lock().unwrap() = true;
    scene.both.set_host(&Host::default()).unwrap();
    scene.log.take();
    scene.model.apply_service(with_node_port().load_balancer_ip("203.0.113.1"));
    assert_eq!(scene.write(), ["own web:cnl", "secondary web:n"]);
}
