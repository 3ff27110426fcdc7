use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Value, json};

use super::*;
use crate::{
    config::Encoding,
    kubernetes::{
        watch::resource::{OwnNode, Services},
        wire::Page,
    },
    model::objects::{Node, Service},
};

fn raw(object: &Value) -> Raw {
    let list = serde_json::to_vec(&json!({"metadata": {}, "items": [object]})).unwrap();
    Page::read(Encoding::Json, &Bytes::from(list), Services::KIND).unwrap().items.remove(0)
}

fn received<W: Watched>(object: &Value) -> Received<W::Parsed> {
    Received::parse::<W>(&raw(object)).unwrap()
}

fn listing<W: Watched>(objects: &[Value]) -> Listing<W::Parsed> {
    let mut listing = Listing::default();
    for object in objects {
        listing.add(received::<W>(object));
    }
    listing
}

fn list<W: Watched>(tracked: &mut Tracked<W::Parsed>, objects: &[Value]) -> Vec<String> {
    tracked.replace(listing::<W>(objects)).0.into_iter().map(shown).collect()
}

fn change<W: Watched>(tracked: &mut Tracked<W::Parsed>, object: &Value) -> Option<String> {
    tracked.change(received::<W>(object)).0.map(shown)
}

fn shown(update: Update) -> String {
    match update {
        Update::ReplaceServices(all) => {
            let names: Vec<_> = all.iter().map(|of| of.name.to_string()).collect();
            format!("all: {}", names.join(" "))
        }
        Update::ApplyService(of) => format!("apply {}", of.name),
        Update::DeleteService(name) => format!("delete {name}"),
        Update::Node(node) => format!("node {:?}", node.map(|node| node.name)),
        other @ (Update::ReplaceSlices(_)
        | Update::ApplySlice(_)
        | Update::DeleteSlice(_)
        | Update::ReplaceServiceCidrs(_)
        | Update::ApplyServiceCidr(_)
        | Update::DeleteServiceCidr(_)) => panic!("{other:?}"),
    }
}

fn service(name: &str) -> Value {
    let spec = json!({"clusterIP": "10.96.0.1", "ports": [{"port": 80}]});
    json!({"metadata": {"namespace": "a", "name": name, "resourceVersion": "1"}, "spec": spec})
}

fn unreadable(name: &str) -> Value {
    json!({"metadata": {"namespace": "a", "name": name, "resourceVersion": "1"}, "spec": "x", "status": 1})
}

fn name(name: &str) -> ObjectName {
    ObjectName::new("a", name)
}

#[test]
fn an_unreadable_object_keeps_its_last_valid_version_until_it_is_deleted() {
    let mut tracked = Tracked::<Service>::default();
    let list = |tracked: &mut _, objects: &[Value]| list::<Services>(tracked, objects);
    let all = [service("web"), service("gone"), unreadable("broken")];
    assert_eq!(list(&mut tracked, &all), ["all: a/web a/gone"]);
    assert_eq!(change::<Services>(&mut tracked, &unreadable("web")), None);
    let relisted = [unreadable("web"), service("new"), unreadable("broken")];
    assert_eq!(list(&mut tracked, &relisted), ["apply a/new", "delete a/gone"]);
    assert_eq!(list(&mut tracked, &[unreadable("web"), service("new")]), ["apply a/new"]);
    assert_eq!(shown(tracked.delete(name("web"))), "delete a/web");
    assert_eq!(list(&mut tracked, &[unreadable("web"), service("new")]), ["all: a/new"]);
    assert_eq!(change::<Services>(&mut tracked, &service("web")).as_deref(), Some("apply a/web"));
    let mut excluded = service("web");
    excluded["spec"]["type"] = json!("ExternalName");
    assert_eq!(change::<Services>(&mut tracked, &excluded).as_deref(), Some("delete a/web"));
    assert_eq!(list(&mut tracked, &[unreadable("web")]), ["all: "]);
}

#[test]
fn the_node_keeps_its_last_valid_version_and_the_same_node_is_not_sent_again() {
    let mut tracked = Tracked::<Node>::default();
    let node = json!({"metadata": {"name": "n", "resourceVersion": "1"}});
    let broken = json!({"metadata": {"name": "n", "resourceVersion": "1"}, "spec": "x"});
    assert_eq!(list::<OwnNode>(&mut tracked, std::slice::from_ref(&node)), ["node Some(\"n\")"]);
    assert_eq!(change::<OwnNode>(&mut tracked, &broken), None);
    assert_eq!(list::<OwnNode>(&mut tracked, std::slice::from_ref(&broken)), [""; 0]);
    assert_eq!(change::<OwnNode>(&mut tracked, &node), None);
    assert_eq!(shown(tracked.delete(ObjectName::new("", "n"))), "node None");
    assert_eq!(list::<OwnNode>(&mut tracked, &[broken]), ["node None"]);
}

#[test]
fn what_is_deleted_or_changed_before_a_list_is_complete_is_not_listed_as_it_was() {
    let mut listing = listing::<Services>(&[service("web"), unreadable("gone"), service("db")]);
    listing.remove(&name("gone"));
    listing.remove(&name("web"));
    listing.exchange(received::<Services>(&unreadable("db")));
    listing.add(received::<Services>(&service("web")));
    assert_eq!(listing.objects, 2);
    let mut tracked = Tracked::default();
    let (updates, new) = tracked.replace(listing);
    assert_eq!(updates.into_iter().map(shown).collect::<Vec<_>>(), ["all: a/web"]);
    assert_eq!((new, tracked.invalid.len()), (1, 1), "only a/db is invalid");
}

#[test]
fn objects_are_found_where_others_have_left_them() {
    let mut listing = listing::<Services>(&["a", "b", "c", "d"].map(service));
    let served = |listing: &Listing<Service>| {
        let mut names: Vec<_> = listing.parsed.iter().map(|service| service.name.name.to_string()).collect();
        names.sort_unstable();
        names.concat()
    };
    listing.remove(&name("a"));
    listing.exchange(received::<Services>(&service("d")));
    listing.add(received::<Services>(&service("e")));
    listing.remove(&name("d"));
    listing.remove(&name("unknown"));
    assert_eq!(served(&listing), "bce");
    for (gone, left) in [("b", "ce"), ("e", "c"), ("c", "")] {
        listing.remove(&name(gone));
        assert_eq!(served(&listing), left);
    }
}

#[test]
fn listed_objects_share_what_they_have_in_common() {
    let listing = listing::<Services>(&["a", "b"].map(service));
    let [a, b] = &listing.parsed[..] else { panic!("two are listed") };
    assert!(Arc::ptr_eq(&a.name.namespace, &b.name.namespace));
    assert!(Arc::ptr_eq(&a.ports[0].name, &b.ports[0].name));
    assert_eq!(a.ports.capacity(), 1);
}

#[test]
fn an_invalid_field_is_logged_once_until_it_changes_or_its_object_is_gone() {
    let invalid = |port: u32| {
        let mut service = service("web");
        service["spec"]["ports"][0]["port"] = json!(port);
        service
    };
    let mut tracked = Tracked::default();
    let mut new = |object: &Value| tracked.change(received::<Services>(object)).1;
    assert_eq!([new(&invalid(0)), new(&invalid(0)), new(&invalid(70_000))], [1, 0, 1]);
    assert_eq!([new(&service("web")), new(&invalid(70_000))], [0, 1]);
    tracked.delete(name("web"));
    let mut relist = |objects: &[Value]| {
        let (_, new) = tracked.replace(listing::<Services>(objects));
        (new, tracked.invalid.len())
    };
    assert_eq!(relist(&[invalid(0)]), (1, 1), "deleted meanwhile");
    assert_eq!(relist(&[invalid(0)]), (0, 1));
    assert_eq!(relist(&[service("db")]), (0, 0), "a list without it");
    assert_eq!(relist(&[invalid(0)]), (1, 1));
}
