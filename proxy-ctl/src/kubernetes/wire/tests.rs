//! Tests of both encodings. Kubernetes' own serializers have written `recorded`
//! (`tests/kubernetes/cmd/encodings`).

use bytes::BufMut as _;
use proptest::prelude::*;

use super::*;
use crate::{
    kubernetes::{
        convert::invalid::InvalidField,
        schema::{ApiObject, core, meta::TypeMeta},
        watch::resource::{EndpointSlices, OwnNode, ServiceCidrs, Services, Watched},
        wire::frames::Frames,
    },
    model::objects::{IpFamily, TrafficPolicy},
};

/// Wraps a message in the envelope that the API server uses for protobuf.
fn envelope(api_version: &str, kind: &str, message: Vec<u8>) -> Vec<u8> {
    let type_meta = TypeMeta { api_version: api_version.to_owned(), kind: kind.to_owned() };
    let unknown = Unknown { type_meta, raw: message.into(), ..Unknown::default() };
    [MAGIC, &unknown.encode_to_vec()].concat()
}

macro_rules! recorded {
    ($name:literal) => {
        [
            (Encoding::Json, include_bytes!(concat!("../recorded/", $name, ".json")).as_slice()),
            (Encoding::Protobuf, include_bytes!(concat!("../recorded/", $name, ".protobuf")).as_slice()),
        ]
    };
}

const SERVICE: ApiType = Services::KIND;

/// Returns the objects of a list, which are the same in both encodings.
fn objects<W: Watched>(lists: [(Encoding, &'static [u8]); 2]) -> Vec<W::Object> {
    let [json, protobuf] = lists.map(|(encoding, body)| {
        let page = Page::read(encoding, &Bytes::from_static(body), W::KIND).unwrap();
        assert_eq!((page.resource_version.as_str(), page.continue_token.as_str()), ("4712", "next"));
        for item in &page.items {
            let meta = item.meta().unwrap();
            let of = Meta::take(item.object::<W::Object>().unwrap().into_metadata());
            assert_eq!((meta.name(), meta.resource_version), (of.name(), of.resource_version));
        }
        page.items.iter().map(|item| item.object::<W::Object>().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(json, protobuf);
    json
}

/// Returns the first of these objects as it is served, and checks that it has no invalid field.
fn served<W: Watched>(lists: [(Encoding, &'static [u8]); 2]) -> W::Parsed {
    let (parsed, invalid) = W::CONVERT(&objects::<W>(lists)[0]);
    assert_eq!(invalid, Vec::<InvalidField>::new());
    parsed.unwrap()
}

#[test]
fn a_service_is_the_same_in_both_encodings() {
    let service = served::<Services>(recorded!("services"));
    assert_eq!(service.name, ObjectName::new("shop", "web"));
    assert_eq!(service.created, 1_767_323_045);
    let ports: Vec<_> = service
        .ports
        .iter()
        .map(|port| (&*port.name, port.protocol.name(), port.port, port.node_port))
        .collect();
    assert_eq!(ports, [("http", "TCP", 80, Some(30080)), ("dns", "UDP", 53, None)]);
    let shown =
        |addresses: &[std::net::IpAddr]| addresses.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(shown(&service.cluster_ips), ["10.96.0.1", "fd00::1"]);
    assert_eq!(shown(&service.external_ips), ["192.0.2.1", "2001:db8::1"]);
    assert_eq!(shown(&service.load_balancer_ips), ["198.51.100.1"]);
    assert_eq!(
        (service.internal_policy, service.external_policy),
        (TrafficPolicy::Local, TrafficPolicy::Local)
    );
    assert_eq!((service.affinity_seconds, service.health_check_node_port), (Some(60), Some(32000)));
    assert_eq!(service.source_ranges, ["203.0.113.0/25".parse().unwrap()]);
    let headless = &objects::<Services>(recorded!("services"))[1];
    assert_eq!(Services::CONVERT(headless), (None, Vec::new()));
}

#[test]
fn a_slice_is_the_same_in_both_encodings() {
    let slice = served::<EndpointSlices>(recorded!("endpointslices"));
    assert_eq!((&*slice.service, slice.family, slice.ports[0].port), ("web", IpFamily::Ipv4, 8080));
    assert_eq!(slice.triggered.unwrap().get(), 1_767_323_045_678_000_000);
    let [first, second] = slice.endpoints.as_slice() else { panic!("{slice:?}") };
    assert_eq!((first.ready, first.serving, first.terminating), (false, true, true));
    assert_eq!(first.node.as_deref(), Some("node-1"));
    let hints = first.hints.as_ref().unwrap();
    assert_eq!((hints.zones.len(), hints.nodes.len()), (2, 1));
    assert_eq!((second.ready, second.serving, second.terminating), (true, true, false));
    assert_eq!((&second.node, &second.hints), (&None, &None));
}

#[test]
fn other_objects_are_the_same_in_both_encodings() {
    let node = served::<OwnNode>(recorded!("nodes"));
    assert_eq!((&*node.name, node.zone.as_deref(), node.being_deleted), ("node-1", Some("z1"), true));
    assert_eq!((node.pod_cidrs.len(), node.taints.len(), node.addresses.len()), (2, 1, 1));

    let ranges = served::<ServiceCidrs>(recorded!("servicecidrs"));
    assert_eq!((&*ranges.name, ranges.ranges.len()), ("kubernetes", 2));
}

#[test]
fn an_error_is_the_same_in_both_encodings() {
    for (encoding, body) in recorded!("status") {
        let failure = Failure::from(&status(encoding, &Bytes::from_static(body)).unwrap());
        assert_eq!((failure.reason, failure.code), (FailureReason::Expired, Some(410)), "{encoding:?}");
        assert_eq!(failure.message, "too old resource version: 1 (7) (410)");
        assert_eq!(failure.retry_after.unwrap().as_secs(), 5);
    }
}

fn events(encoding: Encoding, stream: &[u8]) -> Vec<Event> {
    let mut frames = Frames::new(encoding);
    frames.push(stream);
    let frames: Vec<Bytes> = std::iter::from_fn(|| frames.next().unwrap()).collect();
    frames.iter().map(|frame| Event::read(encoding, frame, SERVICE).unwrap()).collect()
}

#[test]
fn a_watch_is_the_same_in_both_encodings() {
    for (encoding, stream) in recorded!("watch") {
        let events = events(encoding, stream);
        let [Event::Added(added), bookmark @ .., Event::Error(expired)] = events.as_slice() else {
            panic!("{events:?}");
        };
        let web: core::Service = added.object().unwrap();
        assert_eq!((web.metadata.name.as_str(), web.spec.unwrap().ports.len()), ("web", 2));
        assert_eq!(expired.reason, FailureReason::Expired);
        let [
            Event::Bookmark { resource_version: end, ends_list: true },
            Event::Modified(headless),
            Event::Deleted(gone),
            Event::Bookmark { resource_version: later, ends_list: false },
        ] = bookmark
        else {
            panic!("{bookmark:?}");
        };
        assert_eq!((end.as_str(), later.as_str()), ("4713", "4713"));
        assert_eq!(headless.meta().unwrap().name().to_string(), "/headless");
        assert_eq!(gone.meta().unwrap().name().to_string(), "shop/web");
    }
}

/// Returns a list in protobuf with these items.
fn protobuf_list(items: &[&[u8]]) -> Bytes {
    let items = items.iter().map(|item| Bytes::copy_from_slice(item)).collect();
    let list = List { metadata: ListMeta { resource_version: "1".into(), ..ListMeta::default() }, items };
    envelope("v1", "ServiceList", list.encode_to_vec()).into()
}

#[test]
fn one_object_that_cannot_be_read_hides_no_other() {
    let good = objects::<Services>(recorded!("services"))[0].encode_to_vec();
    // The number of this object's port is text.
    let mut bad = Named {
        metadata: NamedMeta { name: "bad".into(), namespace: "shop".into(), resource_version: "2".into() },
    }
    .encode_to_vec();
    bad.put_slice(&[0x12, 5, 0x0a, 3, 0x1a, 1, b'x']);
    let page = Page::read(Encoding::Protobuf, &protobuf_list(&[&bad, &good]), SERVICE).unwrap();
    let [first, second] = page.items.as_slice() else { panic!("{page:?}") };
    let error = first.object::<core::Service>().unwrap_err();
    assert!(error.contains("ServicePort.port"), "{error}");
    assert_eq!(first.meta().unwrap().name().to_string(), "shop/bad");
    assert_eq!(second.object::<core::Service>().unwrap().metadata.name, "web");
}

/// API servers validate names, but not annotations.
#[test]
fn what_is_no_text_is_read_as_the_api_server_writes_it_in_json() {
    let mut web = objects::<Services>(recorded!("services")).remove(0);
    web.metadata.annotations.insert("drink".into(), "caf~".into());
    let whole = Services::CONVERT(&web);
    let bytes = web.encode_to_vec().into_iter().map(|byte| if byte == b'~' { 0xe9 } else { byte });
    let raw = Raw { encoding: Encoding::Protobuf, bytes: bytes.collect() };
    let read: core::Service = raw.object().unwrap();
    assert_eq!(read.metadata.annotations["drink"], "caf\u{fffd}");
    assert_eq!(Services::CONVERT(&read), whole);
    assert_eq!(raw.meta().unwrap().name().to_string(), "shop/web");
}

#[test]
fn what_was_not_asked_for_is_named() {
    let message = |api_version: &str, kind: &str| Bytes::from(envelope(api_version, kind, Vec::new()));
    for (body, problem) in [
        (Bytes::from_static(b"<html>"), "it begins with \"<htm\""),
        (Bytes::from_static(b"k8"), "it begins with \"k8\""),
        (Bytes::from_static(b"k8s\0\x0a\xff"), "not a message of Kubernetes"),
        (message("v1", "Table"), "found \"Table\" of \"v1\" where ServiceList of v1"),
        (message("v2", "ServiceList"), "found \"ServiceList\" of \"v2\""),
        (message("v1", "Service"), "found \"Service\" of \"v1\""),
    ] {
        let failure = Page::read(Encoding::Protobuf, &body, SERVICE).unwrap_err();
        assert_eq!(failure.reason, FailureReason::Malformed);
        assert!(failure.message.contains(problem), "{failure}");
    }
    let greeting = br#"{"type":"GREETING","object":{}}"#.as_slice();
    let event = Event::read(Encoding::Json, &Bytes::from_static(greeting), SERVICE);
    assert!(event.unwrap_err().message.contains("unknown type \"GREETING\""));
}

#[test]
fn a_json_page_without_items_or_with_null_is_empty() {
    for text in
        [r#"{"metadata":{"resourceVersion":"3"},"items":null}"#, r#"{"metadata":{"resourceVersion":"3"}}"#]
    {
        let page = Page::read(Encoding::Json, &Bytes::from_static(text.as_bytes()), SERVICE).unwrap();
        assert!(page.items.is_empty() && page.continue_token.is_empty());
        assert_eq!(page.resource_version, "3");
    }
}

#[test]
fn items_are_not_copied_out_of_their_list() {
    for (encoding, body) in recorded!("services") {
        let body = Bytes::from_static(body);
        let page = Page::read(encoding, &body, SERVICE).unwrap();
        for item in page.items {
            assert!(body.as_ptr_range().contains(&item.bytes.as_ptr()), "{encoding:?}");
        }
    }
}

/// Does everything with the bytes that a watcher does with an answer.
fn read_all(encoding: Encoding, bytes: &[u8]) {
    let body = Bytes::copy_from_slice(bytes);
    let read = |raw: Raw| {
        let _ = raw.meta();
        if let Ok(object) = raw.object() {
            Services::CONVERT(&object);
        }
        let _ = raw.object::<crate::kubernetes::schema::discovery::EndpointSlice>();
    };
    if let Ok(page) = Page::read(encoding, &body, SERVICE) {
        page.items.into_iter().for_each(read);
    }
    let _ = status(encoding, &body);
    let mut frames = Frames::new(encoding);
    frames.push(bytes);
    while let Ok(Some(frame)) = frames.next() {
        if let Ok(Event::Added(raw) | Event::Modified(raw) | Event::Deleted(raw)) =
            Event::read(encoding, &frame, SERVICE)
        {
            read(raw);
        }
    }
    read(Raw { encoding, bytes: body });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn arbitrary_bytes_are_at_most_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        for encoding in Encoding::ALL {
            read_all(encoding, &bytes);
            read_all(encoding, &envelope("v1", "ServiceList", bytes.clone()));
        }
    }

    /// Bytes that are nearly right get further in the decoder than arbitrary ones.
    #[test]
    fn what_is_recorded_is_at_most_an_error_when_it_is_changed(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        end in any::<prop::sample::Index>(),
    ) {
        for (encoding, body) in recorded!("services").into_iter().chain(recorded!("watch")) {
            let mut body = body.to_vec();
            for (at, byte) in &changes {
                let at = at.index(body.len());
                body[at] = *byte;
            }
            read_all(encoding, &body);
            read_all(encoding, &body[..end.index(body.len())]);
        }
    }
}
