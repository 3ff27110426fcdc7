//! Tests of what is in a text, and of how its errors are reported.

use rstest::rstest;

use super::super::document::{ManifestObject, ParsedFile, parse};

const WEB: &str = "\
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.96.0.1
  ports:
  - port: 80
";

const SLICE: &str = "\
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: web-1
  namespace: shop
  labels: {kubernetes.io/service-name: web}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.0.0.1]}]
";

const RANGES: &str = "\
apiVersion: networking.k8s.io/v1
kind: ServiceCIDR
metadata: {name: more}
spec: {cidrs: [10.96.0.0/12, \"fd00:10:96::/112\"]}
";

const NODE: &str = "apiVersion: v1\nkind: Node\nmetadata: {name: here}\n";

fn read(text: &str) -> ParsedFile {
    parse("web.yaml", text, "here")
}

fn identities(parsed: &ParsedFile) -> Vec<String> {
    parsed.objects.iter().map(|(identity, _)| identity.to_string()).collect()
}

fn invalid(parsed: &ParsedFile) -> Vec<(&str, &str, &str)> {
    let shown = parsed.invalid.iter();
    shown.map(|of| (of.object.as_str(), of.field.as_str(), of.problem.as_str())).collect()
}

const ALL: &[&str] = &["Service shop/web", "EndpointSlice shop/web-1", "Node here"];

#[rstest]
#[case::one_document(WEB.into(), &ALL[..1])]
#[case::several(format!("{WEB}---\n{SLICE}---\n{NODE}"), ALL)]
#[case::marker_first_and_last(format!("---\n{WEB}---\n{SLICE}---\n{NODE}---\n"), ALL)]
#[case::comments_and_ends(
    format!("# shop\n--- # web\n{WEB}...\n---\n# nothing\n---\n{SLICE}--- \n\n{NODE}"), ALL
)]
#[case::directive(format!("%YAML 1.2\n---\n{WEB}"), &ALL[..1])]
#[case::windows_line_ends(format!("{WEB}---\n{SLICE}").replace('\n', "\r\n"), &ALL[..2])]
#[case::byte_order_mark(format!("\u{feff}{WEB}"), &ALL[..1])]
#[case::dashes_within_text(
    format!("{WEB}---\n{}", SLICE.replace("labels: {", "annotations: {text: \"a\\n---\\nb\"}\n  labels: {")),
    &ALL[..2]
)]
#[case::other_kinds("apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\n".into(), &[])]
#[case::service_of_another_group(WEB.replace("apiVersion: v1", "apiVersion: serving.knative.dev/v1"), &[])]
#[case::service_ranges(RANGES.into(), &["ServiceCIDR more"])]
#[case::service_ranges_of_another_group(RANGES.replace("networking.k8s.io", "example.com"), &[])]
#[case::other_node(NODE.replace("here", "there"), &["Node there"])]
#[case::namespace_is_default(WEB.replace(", namespace: shop", ""), &["Service default/web"])]
#[case::empty(String::new(), &[])]
#[case::only_comments("# nothing\n\n---\n# more\n".into(), &[])]
fn reads_documents(#[case] text: String, #[case] expected: &[&str]) {
    let parsed = read(&text);
    assert_eq!(invalid(&parsed), []);
    assert_eq!(identities(&parsed), expected);
}

fn json(text: &str) -> String {
    let value: serde_json::Value = serde_saphyr::from_str(text).unwrap();
    serde_json::to_string_pretty(&value).unwrap()
}

#[test]
fn reads_json() {
    let list =
        format!(r#"{{"kind": "List", "apiVersion": "v1", "items": [{}, {}]}}"#, json(WEB), json(SLICE));
    let tabs = list.replace("  ", "\t");
    let line = list.replace('\n', " ");
    for text in [list, tabs, line] {
        let parsed = read(&text);
        assert_eq!(invalid(&parsed), [], "{text}");
        assert_eq!(identities(&parsed), ALL[..2]);
        assert_eq!(parsed.objects, read(&format!("{WEB}---\n{SLICE}")).objects);
    }
}

#[rstest]
#[case::headless(WEB.replace("10.96.0.1", "None"))]
#[case::external_name(WEB.replace("clusterIP: 10.96.0.1", "type: ExternalName"))]
fn what_is_not_for_this_proxy_is_not_invalid(#[case] text: String) {
    let parsed = read(&text);
    assert_eq!(invalid(&parsed), []);
    assert_eq!(parsed.objects[0].1, ManifestObject::NotServed);
}

#[rstest]
#[case::wrong_type(
    WEB.replace("port: 80", "port: eighty"),
    "web.yaml, document 2: Service shop/web", "spec.ports[0].port", "line 17"
)]
#[case::wrong_structure(
    WEB.replace("spec:\n", "spec: 5\nignored:\n"), "web.yaml, document 2: Service shop/web", "spec", "line 14"
)]
#[case::no_yaml(
    WEB.replace("clusterIP: 10.96.0.1", "clusterIP: [10.96.0.1"), "web.yaml, document 2", "spec.clusterIP", "at line 16"
)]
#[case::no_kind(WEB.replace("kind: Service\n", ""), "web.yaml, document 2", "kind", "is missing, must be Service, EndpointSlice, Node, ServiceCIDR or List")]
#[case::no_api_version(
    WEB.replace("apiVersion: v1\n", ""), "web.yaml, document 2: Service shop/web", "apiVersion", "is missing, must be v1"
)]
#[case::old_slice(
    SLICE.replace("k8s.io/v1", "k8s.io/v1beta1"),
    "web.yaml, document 2: EndpointSlice shop/web-1", "apiVersion", "found \"discovery.k8s.io/v1beta1\", must be discovery.k8s.io/v1"
)]
#[case::old_service_ranges(
    RANGES.replace("/v1", "/v1beta1"), "web.yaml, document 2: ServiceCIDR more", "apiVersion", "found \"networking.k8s.io/v1beta1\", must be networking.k8s.io/v1"
)]
#[case::invalid_service_range(
    RANGES.replace("10.96.0.0/12", "10.96.0.0/33"), "web.yaml, document 2: ServiceCIDR more", "spec.cidrs[0]", "must be"
)]
#[case::no_name(
    WEB.replace("{name: web, namespace: shop}", "{}"),
    "web.yaml, document 2", "metadata.name", "is missing, must be the name of the Service"
)]
#[case::no_cluster_ip(
    WEB.replace("clusterIP: 10.96.0.1", "type: NodePort"),
    "web.yaml, document 2: Service shop/web", "spec.clusterIP", "is missing, must be an address"
)]
#[case::invalid_address(
    WEB.replace("10.96.0.1", "10.96.0.256"),
    "web.yaml, document 2: Service shop/web", "spec.clusterIP", "found \"10.96.0.256\", must be an IPv4 or IPv6"
)]
#[case::wrong_item(
    format!("kind: List\nitems:\n- {}\n", WEB.replace("port: 80", "port: eighty").trim_end().replace('\n', "\n  ")),
    "web.yaml, document 2: Service shop/web", "items[0].spec.ports[0].port", "in the item at line 13"
)]
#[case::items_is_no_list("kind: List\nitems: 7\n".into(), "web.yaml, document 2", "items", "line 12")]
#[case::scalar("hello\n".into(), "web.yaml, document 2", "", "line 11")]
fn a_broken_document_is_named_and_leaves_the_others(
    #[case] broken: String,
    #[case] object: &str,
    #[case] field: &str,
    #[case] problem: &str,
) {
    // The first document has nine lines.
    let parsed = read(&format!("{SLICE}---\n{broken}---\n{NODE}"));
    assert_eq!(identities(&parsed), ALL[1..]);
    let found = invalid(&parsed);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((found[0].0, found[0].1), (object, field), "{found:?}");
    assert!(found[0].2.contains(problem), "{found:?}");
    assert!(parsed.is_broken);
}

#[test]
fn a_broken_item_leaves_the_other_items() {
    let text = format!(
        "kind: List\napiVersion: v1\nitems:\n- kind: Service\n  apiVersion: v1\n- {}\n",
        SLICE.trim_end().replace('\n', "\n  ")
    );
    let parsed = read(&text);
    assert_eq!(identities(&parsed), [ALL[1]]);
    assert_eq!(invalid(&parsed)[0].1, "items[0].metadata.name");
}

#[test]
fn an_invalid_part_is_left_out_and_the_rest_is_served() {
    let parsed = read(&WEB.replace("- port: 80", "- {name: a, port: 80}\n  - {name: b, port: 0}"));
    let ManifestObject::Service(service) = &parsed.objects[0].1 else { panic!("{parsed:?}") };
    assert_eq!(service.ports.len(), 1);
    assert_eq!(
        invalid(&parsed),
        [("web.yaml, document 1: Service shop/web", "spec.ports[1].port", "found 0, must be 1 to 65535")]
    );
    assert!(!parsed.is_broken);
}

#[test]
fn many_documents_and_large_lists_are_read() {
    let services: String =
        (0..3000).map(|n| WEB.replace("name: web", &format!("name: web-{n}")) + "---\n").collect();
    let parsed = read(&services);
    assert_eq!(invalid(&parsed), []);
    assert_eq!(parsed.objects.len(), 3000);
}
