//! Tests of what the folder holds after its files have changed.

use std::{fs, os::unix::fs::symlink, path::Path};

use rstest::rstest;
use tempfile::TempDir;

use super::super::folder::{Folder, Listing};
use crate::model::objects::Node;

pub(super) fn service(name: &str, address: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{clusterIP: {address}, ports: [{{port: 80}}]}}\n"
    )
}

struct Setup {
    directory: TempDir,
    folder: Folder,
}

impl Setup {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let folder = Folder::new(directory.path().to_owned(), "here".into());
        Self { directory, folder }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path().join(name), text).unwrap();
    }

    fn list(&mut self) -> Listing {
        self.folder.list().unwrap()
    }
}

fn shown(listing: &Listing) -> Vec<String> {
    let services = listing.services.iter();
    services.map(|service| format!("{} {}", service.name.name, service.cluster_ips[0])).collect()
}

fn invalid(listing: &Listing) -> Vec<&str> {
    listing.invalid.iter().map(|field| field.object.as_str()).collect()
}

const A: &str = "a 10.96.0.1";
const B: &str = "b 10.96.0.2";

fn two() -> String {
    format!("{}---\n{}", service("a", "10.96.0.1"), service("b", "10.96.0.2"))
}

#[rstest]
#[case::unchanged(Some(two()), &[A, B], &[])]
#[case::second_changed(Some(two().replace("0.2", "0.9")), &[A, "b 10.96.0.9"], &[])]
#[case::second_removed(Some(service("a", "10.96.0.1")), &[A], &[])]
#[case::renamed(Some(two().replace("name: b", "name: c")), &[A, "c 10.96.0.2"], &[])]
#[case::empty(Some(String::new()), &[], &[])]
#[case::file_removed(None, &[], &[])]
#[case::broken_document_keeps_its_last_state(
    Some(two().replace("10.96.0.2, ports: [{port: 80}]", "10.96.0.2, ports: [{port: x}]")),
    &[A, B], &["web.yaml, document 2: Service default/b"]
)]
#[case::address_of_no_kind_keeps_its_last_state(
    Some(two().replace("10.96.0.2", "10.96.0.x")), &[A, B], &["web.yaml, document 2: Service default/b"]
)]
#[case::the_rest_of_a_broken_file_changes(
    Some(two().replace("10.96.0.2", "[").replace("0.1", "0.9")), &["a 10.96.0.9", B], &["web.yaml, document 2"]
)]
#[case::while_a_document_cannot_be_read_nothing_of_the_file_goes(
    Some("kind: [\n".into()), &[A, B], &["web.yaml, document 1"]
)]
#[case::became_headless(Some(two().replace("10.96.0.2", "None")), &[A], &[])]
fn a_file_that_was_good_becomes(
    #[case] text: Option<String>,
    #[case] expected: &[&str],
    #[case] expected_invalid: &[&str],
) {
    let mut setup = Setup::new();
    setup.write("web.yaml", &two());
    setup.write("other.yaml", &service("z", "10.96.0.99"));
    setup.list();
    match text {
        Some(text) => setup.write("web.yaml", &text),
        None => fs::remove_file(setup.path().join("web.yaml")).unwrap(),
    }
    let listing = setup.list();
    let expected: Vec<_> = expected.iter().copied().chain(["z 10.96.0.99"]).collect();
    assert_eq!(shown(&listing), expected);
    assert_eq!(invalid(&listing), expected_invalid);
    // The same contents are not reported again, and no object is lost.
    let again = setup.list();
    assert_eq!(shown(&again), expected);
    assert_eq!(invalid(&again), [""; 0]);
    // After the file is corrected, everything is as before.
    setup.write("web.yaml", &two());
    let corrected = setup.list();
    assert_eq!(shown(&corrected), [A, B, "z 10.96.0.99"]);
    assert_eq!(invalid(&corrected), [""; 0]);
}

#[test]
fn what_breaks_again_is_told_again() {
    let mut setup = Setup::new();
    for _ in 0..2 {
        setup.write("web.yaml", "kind: [\n");
        assert_eq!(invalid(&setup.list()), ["web.yaml, document 1"]);
        setup.write("web.yaml", &two());
        assert_eq!(invalid(&setup.list()), [""; 0]);
    }
}

#[test]
fn a_document_broken_from_the_start_is_left_out() {
    let mut setup = Setup::new();
    setup.write("web.yaml", &two().replace("10.96.0.2", "10.96.0.x"));
    let listing = setup.list();
    assert_eq!(shown(&listing), [A]);
    assert_eq!(listing.invalid[0].field, "spec.clusterIP");
}

#[test]
fn bytes_that_are_no_text_keep_the_file_as_it_was() {
    let mut setup = Setup::new();
    setup.write("web.yaml", &two());
    setup.list();
    fs::write(setup.path().join("web.yaml"), [0xff, 0xfe, 0x00]).unwrap();
    let listing = setup.list();
    assert_eq!(shown(&listing), [A, B]);
    assert_eq!(invalid(&listing), ["web.yaml"]);
}

#[test]
fn of_two_files_with_one_object_the_first_counts() {
    let mut setup = Setup::new();
    setup.write("1.yaml", &service("a", "10.96.0.1"));
    setup.write("2.yaml", &service("a", "10.96.0.2"));
    let listing = setup.list();
    assert_eq!(shown(&listing), [A]);
    assert_eq!(invalid(&listing), ["2.yaml: Service default/a"]);
    fs::remove_file(setup.path().join("1.yaml")).unwrap();
    assert_eq!(shown(&setup.list()), ["a 10.96.0.2"]);
}

#[test]
fn an_object_that_moved_out_of_a_broken_file_counts_where_it_is() {
    let mut setup = Setup::new();
    setup.write("1.yaml", &two());
    setup.list();
    setup.write("1.yaml", "kind: [\n");
    setup.write("2.yaml", &service("b", "10.96.0.9"));
    let listing = setup.list();
    assert_eq!(shown(&listing), [A, "b 10.96.0.9"]);
    assert_eq!(invalid(&listing), ["1.yaml, document 1"]);
}

#[test]
fn only_manifest_files_are_read() {
    let mut setup = Setup::new();
    for name in ["a.yaml.swp", ".hidden.yaml", "README.md", "b.yaml~", "noextension"] {
        setup.write(name, "kind: [\n");
    }
    fs::create_dir(setup.path().join("folder.yaml")).unwrap();
    symlink("nowhere", setup.path().join("dangling.yaml")).unwrap();
    setup.write("1.yml", &service("a", "10.96.0.1"));
    setup.write(
        "2.json",
        r#"{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "b"},
            "spec": {"clusterIP": "10.96.0.2", "ports": [{"port": 80}]}}"#,
    );
    let listing = setup.list();
    assert_eq!(shown(&listing), [A, B]);
    assert_eq!(invalid(&listing), [""; 0]);
}

#[test]
fn the_own_node_is_found() {
    let mut setup = Setup::new();
    let node = |name: &str, zone: &str| {
        format!(
            "apiVersion: v1\nkind: Node\nmetadata: {{name: {name}, labels: {{topology.kubernetes.io/zone: {zone}}}}}\n"
        )
    };
    setup.write("nodes.yaml", &format!("{}---\n{}", node("there", "z2"), node("here", "z1")));
    assert_eq!(setup.list().node.and_then(|node| node.zone).as_deref(), Some("z1"));
    setup.write("nodes.yaml", &node("there", "z2"));
    let listing = setup.list();
    assert_eq!(listing.node, None);
    assert_eq!(invalid(&listing), ["Node here"]);
    assert!(listing.invalid[0].problem.contains("found only there; --hostname-override"), "{listing:?}");
}

#[test]
fn without_any_node_there_is_one_of_which_nothing_is_known() {
    let mut setup = Setup::new();
    let unknown = Node { name: "here".into(), ..Node::default() };
    for files in [&[][..], &[("a.yaml", service("a", "10.96.0.1"))]] {
        files.iter().for_each(|(name, text)| setup.write(name, text));
        let listing = setup.list();
        assert_eq!(listing.node.as_ref(), Some(&unknown));
        assert_eq!(invalid(&listing), [""; 0]);
    }
}

/// A pipe must not be opened, because opening it waits for a writer.
#[test]
fn a_pipe_is_named_and_not_opened() {
    let mut setup = Setup::new();
    nix::unistd::mkfifo(&setup.path().join("pipe.yaml"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    symlink("/dev/zero", setup.path().join("endless.yaml")).unwrap();
    setup.write("1.yaml", &service("a", "10.96.0.1"));
    let listing = setup.list();
    assert_eq!(shown(&listing), [A]);
    assert_eq!(invalid(&listing), ["endless.yaml", "pipe.yaml"]);
    assert!(listing.invalid[0].problem.contains("must be a regular file"), "{listing:?}");
}
