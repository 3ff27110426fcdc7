//! Parsing of the text of a manifest file. What is wrong with it is reported by document, line and
//! field.

use std::fmt;

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use serde_saphyr::Spanned;

use crate::{
    kubernetes::{
        convert::{self, invalid::InvalidField},
        schema::{core, discovery, meta::ObjectMeta, networking},
    },
    model::objects::{EndpointSlice, Node, ObjectName, Service, ServiceCidr},
};

const DISCOVERY: &str = "discovery.k8s.io/v1";
const NETWORKING: &str = "networking.k8s.io/v1";

#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) enum ManifestKind {
    Service,
    EndpointSlice,
    Node,
    ServiceCidr,
}

impl ManifestKind {
    const ALL: [Self; 4] = [Self::Service, Self::EndpointSlice, Self::Node, Self::ServiceCidr];

    const fn name(self) -> &'static str {
        match self {
            Self::Service => "Service",
            Self::EndpointSlice => "EndpointSlice",
            Self::Node => "Node",
            Self::ServiceCidr => "ServiceCIDR",
        }
    }

    const fn api_version(self) -> &'static str {
        match self {
            Self::Service | Self::Node => "v1",
            Self::EndpointSlice => DISCOVERY,
            Self::ServiceCidr => NETWORKING,
        }
    }

    const fn is_namespaced(self) -> bool {
        match self {
            Self::Service | Self::EndpointSlice => true,
            Self::Node | Self::ServiceCidr => false,
        }
    }

    /// Returns true if `api_version` is of the group of this kind. Its other versions are not read,
    /// and are reported.
    fn is_of_group(self, api_version: &str) -> bool {
        let group = self.api_version().split_once('/').map(|(group, _)| group);
        group.is_some() && api_version.split_once('/').map(|(group, _)| group) == group
    }
}

/// The identity of an object. Two documents with the same identity are versions of one object.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct Identity {
    pub(super) kind: ManifestKind,
    pub(super) name: ObjectName,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind.name();
        match self.kind {
            ManifestKind::Node | ManifestKind::ServiceCidr => write!(f, "{kind} {}", self.name.name),
            ManifestKind::Service | ManifestKind::EndpointSlice => write!(f, "{kind} {}", self.name),
        }
    }
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum ManifestObject {
    Service(Service),
    EndpointSlice(EndpointSlice),
    Node(Node),
    ServiceCidr(ServiceCidr),
    /// The object is valid, but this proxy does not serve it: it is headless, ExternalName, of
    /// another proxy or another node, or has host names.
    NotServed,
}

#[derive(Debug, Default)]
pub(super) struct ParsedFile {
    pub(super) objects: Vec<(Identity, ManifestObject)>,
    /// True if some document could not be read.
    pub(super) is_broken: bool,
    pub(super) invalid: Vec<InvalidField>,
}

/// The fields of a document that are read before its kind is known.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Header {
    api_version: Option<String>,
    kind: Option<String>,
    metadata: Option<Metadata>,
}

#[derive(Deserialize)]
struct Metadata {
    namespace: Option<String>,
    name: Option<String>,
}

#[derive(Deserialize)]
struct List {
    #[serde(default)]
    items: Vec<Spanned<Value>>,
}

/// Parses the text of a file. `file` is its name in messages. The contents of Nodes other than
/// `node_name` are not read.
pub(super) fn parse(file: &str, text: &str, node_name: &str) -> ParsedFile {
    let mut reader = Reader { node_name, origin: String::new(), parsed: ParsedFile::default() };
    for (index, document) in split(text).into_iter().enumerate() {
        reader.origin = format!("{file}, document {}", index + 1);
        reader.document(&document);
    }
    reader.parsed
}

/// A document of a file.
#[derive(Debug, Eq, PartialEq)]
struct FilePart<'a> {
    text: &'a str,
    /// The number of lines of the file before it.
    lines_before: u64,
}

/// Splits a file into documents at lines that start with `---`, which YAML allows nowhere else. A
/// document that does not parse thus leaves the next ones readable. Documents of nothing but blank
/// lines, comments and directives are left out.
fn split(text: &str) -> Vec<FilePart<'_>> {
    let mut documents = Vec::new();
    let (mut start, mut start_line) = (0, 0);
    let mut offset = 0;
    for (line, content) in text.split_inclusive('\n').enumerate() {
        let marker = content.strip_prefix("---");
        if marker.is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n'])) {
            documents.push(FilePart { text: &text[start..offset], lines_before: start_line });
            (start, start_line) = (offset, line as u64);
        }
        offset += content.len();
    }
    documents.push(FilePart { text: &text[start..], lines_before: start_line });
    documents.retain(|document| {
        let lines = document.text.trim_start_matches('\u{feff}').lines();
        let content = lines.map(|line| line.strip_prefix("---").unwrap_or(line).trim());
        content.into_iter().any(|line| !line.is_empty() && line != "..." && !line.starts_with(['#', '%']))
    });
    documents
}

/// The text of an object, which can be read as a type.
enum Text<'a> {
    Document(&'a FilePart<'a>),
    /// An item of a list, with its number and its line.
    Item(&'a Value, usize, u64),
}

/// The reason why a text is not of the wanted type.
struct Problem {
    field: String,
    message: String,
}

impl Text<'_> {
    fn read<T: DeserializeOwned>(&self) -> Result<T, Problem> {
        match self {
            Self::Document(document) => {
                let mut field = String::new();
                let options = serde_saphyr::options! { budget: None, with_snippet: false };
                serde_saphyr::with_deserializer_from_str_with_options(
                    document.text,
                    options,
                    |deserializer| {
                        serde_path_to_error::deserialize(deserializer).map_err(|error| {
                            field = path(&error);
                            error.into_inner()
                        })
                    },
                )
                .map_err(|error| {
                    let mut rendering = serde_saphyr::RenderOptions::default();
                    rendering.line_offset = document.lines_before;
                    Problem { field, message: error.without_snippet().render_with_options(rendering) }
                })
            }
            Self::Item(value, number, line) => {
                serde_path_to_error::deserialize(*value).map_err(|error| Problem {
                    field: format!("items[{number}].{}", path(&error)),
                    message: format!("{}, in the item at line {line}", error.into_inner()),
                })
            }
        }
    }

    /// Returns the path of a field from the document's root.
    fn field(&self, field: &str) -> String {
        match self {
            Self::Document(_) => field.to_owned(),
            Self::Item(_, number, _) => format!("items[{number}].{field}"),
        }
    }
}

/// Returns the path of the field that an error is about. It is empty for the root.
fn path<E>(error: &serde_path_to_error::Error<E>) -> String {
    match error.path().to_string() {
        root if root == "." => String::new(),
        path => path,
    }
}

struct Reader<'a> {
    node_name: &'a str,
    /// The name of the file and the number of the document, for messages.
    origin: String,
    parsed: ParsedFile,
}

impl Reader<'_> {
    fn document(&mut self, document: &FilePart<'_>) {
        let text = Text::Document(document);
        let header = match text.read::<Header>() {
            Ok(header) => header,
            Err(problem) => return self.broken(None, problem),
        };
        let is_list = header.kind.as_deref().is_some_and(|kind| kind.ends_with("List"));
        if !is_list {
            return self.object(&text, &header);
        }
        match text.read::<List>() {
            Ok(list) => {
                for (number, item) in list.items.iter().enumerate() {
                    let line = item.referenced.line() + document.lines_before;
                    let text = Text::Item(&item.value, number, line);
                    match text.read::<Header>() {
                        Ok(header) => self.object(&text, &header),
                        Err(problem) => self.broken(None, problem),
                    }
                }
            }
            Err(problem) => self.broken(None, problem),
        }
    }

    fn object(&mut self, text: &Text<'_>, header: &Header) {
        let api_version = header.api_version.as_deref().unwrap_or_default();
        let Some(name) = header.kind.as_deref().filter(|kind| !kind.is_empty()) else {
            let field = text.field("kind");
            let names = ManifestKind::ALL.map(ManifestKind::name).join(", ");
            let message = format!("is missing, must be {names} or List");
            return self.broken(None, Problem { field, message });
        };
        let Some(kind) = ManifestKind::ALL.into_iter().find(|kind| kind.name() == name) else {
            tracing::debug!("{}: {api_version} {name} is of no use here", self.origin);
            return;
        };
        let right = kind.api_version();
        let wrong_version = match api_version {
            "" => Some(format!("is missing, must be {right}")),
            found if found == right => None,
            other if kind.is_of_group(other) => Some(format!("found {other:?}, must be {right}")),
            other => {
                tracing::debug!("{}: {other} {name} is of no use here", self.origin);
                return;
            }
        };
        let metadata = header.metadata.as_ref();
        let name = metadata.and_then(|metadata| metadata.name.clone()).unwrap_or_default();
        if name.is_empty() {
            let field = text.field("metadata.name");
            let message = format!("is missing, must be the name of the {}", kind.name());
            return self.broken(None, Problem { field, message });
        }
        let namespace =
            metadata.filter(|_| kind.is_namespaced()).and_then(|metadata| metadata.namespace.clone());
        let namespace = namespace.unwrap_or_default();
        let name = convert::name(&ObjectMeta { name, namespace, ..ObjectMeta::default() });
        let identity = Identity { kind, name };
        if let Some(message) = wrong_version {
            let field = text.field("apiVersion");
            return self.broken(Some(&identity), Problem { field, message });
        }
        match kind {
            ManifestKind::Service => self.typed(text, identity, |service: core::Service| {
                let (converted, mut invalid) = convert::service(&service);
                invalid.extend(without_cluster_ip(&service));
                (converted.map(ManifestObject::Service), invalid)
            }),
            ManifestKind::EndpointSlice => self.typed(text, identity, |slice: discovery::EndpointSlice| {
                let (slice, invalid) = convert::endpoint_slice(&slice);
                (slice.map(ManifestObject::EndpointSlice), invalid)
            }),
            ManifestKind::Node if *identity.name.name == *self.node_name => {
                self.typed(text, identity, |node: core::Node| {
                    let (node, invalid) = convert::node(&node);
                    (Some(ManifestObject::Node(node)), invalid)
                });
            }
            ManifestKind::Node => self.parsed.objects.push((identity, ManifestObject::NotServed)),
            ManifestKind::ServiceCidr => self.typed(text, identity, |cidr: networking::ServiceCidr| {
                let (cidr, invalid) = convert::service_cidr(&cidr.metadata, &cidr.spec.cidrs);
                // A ServiceCIDR with an invalid range is not used, and its last valid version
                // stays. Without that range, packets that are to be dropped would pass.
                let cidr = cidr.filter(|_| invalid.is_empty());
                (cidr.map(ManifestObject::ServiceCidr), invalid)
            }),
        }
    }

    fn typed<T: DeserializeOwned>(
        &mut self,
        text: &Text<'_>,
        identity: Identity,
        convert: impl FnOnce(T) -> (Option<ManifestObject>, Vec<InvalidField>),
    ) {
        let object = match text.read::<T>() {
            Ok(object) => object,
            Err(problem) => return self.broken(Some(&identity), problem),
        };
        let (object, invalid) = convert(object);
        match object {
            Some(object) => self.parsed.objects.push((identity, object)),
            None if invalid.is_empty() => self.parsed.objects.push((identity, ManifestObject::NotServed)),
            None => self.parsed.is_broken = true,
        }
        self.parsed.invalid.extend(invalid.into_iter().map(|field| InvalidField {
            object: format!("{}: {}", self.origin, field.object),
            field: text.field(&field.field),
            problem: field.problem,
        }));
    }

    /// Notes that a document or item cannot be read. `identity` is None if not even its kind and
    /// name could be read.
    fn broken(&mut self, identity: Option<&Identity>, problem: Problem) {
        let object = identity.map(|identity| format!("{}: {identity}", self.origin));
        let object = object.unwrap_or_else(|| self.origin.clone());
        self.parsed.invalid.push(InvalidField { object, field: problem.field, problem: problem.message });
        self.parsed.is_broken = true;
    }
}

/// Returns the problem of a Service without a cluster IP. An API server would have allocated one.
fn without_cluster_ip(service: &core::Service) -> Option<InvalidField> {
    let spec = service.spec.as_ref();
    let is_set = |address: Option<&String>| address.is_some_and(|address| !address.is_empty());
    let listed = spec.and_then(|spec| spec.cluster_ips.first());
    let external_name = spec.is_some_and(|spec| spec.service_type == "ExternalName");
    let missing = !is_set(spec.map(|spec| &spec.cluster_ip)) && !is_set(listed);
    (missing && !external_name).then(|| InvalidField {
        object: format!("Service {}", convert::name(&service.metadata)),
        field: "spec.clusterIP".into(),
        problem: "is missing, must be an address, or None for a headless Service".into(),
    })
}
