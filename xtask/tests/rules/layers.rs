//! The imports among the modules of proxy-ctl. They go downwards in the table of modules in
//! ARCHITECTURE.md, so that there are no import cycles. Among the modules of each folder there are
//! none either. A module that imports its parent is no cycle.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use proc_macro2::{TokenStream, TokenTree};

use crate::{
    exceptions::{self, Broken},
    paths::{paths, without_tests},
    tree,
};

pub(crate) const KIND: &str = "import";
const CYCLE: &str = "cycle";
const SOURCES: &str = "proxy-ctl/src";

/// The files that import one module into another, by the names of both.
type Imports = BTreeMap<(String, String), BTreeSet<String>>;

/// Returns the modules that a table lists in its first column, from the top down.
fn order(page: &str) -> Vec<String> {
    let table = page.lines().skip_while(|line| !line.starts_with("| module |"));
    let rows = table.take_while(|line| line.starts_with('|')).filter_map(|row| row.split('|').nth(1));
    // Every second part is in backticks.
    let names = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    rows.flat_map(names).collect()
}

/// Returns the names of modules that have files of their own.
fn modules(tokens: TokenStream) -> Vec<String> {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let module = |tokens: &[TokenTree]| match tokens {
        [TokenTree::Ident(word), TokenTree::Ident(name), TokenTree::Punct(end)]
            if word == "mod" && end.as_char() == ';' =>
        {
            Some(name.to_string())
        }
        _ => None,
    };
    tokens.windows(3).filter_map(module).collect()
}

/// Returns the words of `path` from the crate down if it stands in the module `within`. A path that
/// leads above the crate in a module written inside of its parent is taken from the crate.
fn absolute(path: &str, within: &[String]) -> Option<Vec<String>> {
    let mut depth = within.len();
    let mut words = path.split("::").peekable();
    match *words.peek()? {
        "crate" => depth = 0,
        "self" | "super" => {}
        _ => return None,
    }
    while let Some(word) = words.next_if(|word| matches!(*word, "crate" | "self" | "super")) {
        depth = depth.saturating_sub(usize::from(word == "super"));
    }
    Some(within[..depth].iter().cloned().chain(words.map(str::to_owned)).collect())
}

/// A module of the crate, by the names that lead to it, and the paths that its file names.
struct Module {
    name: Vec<String>,
    file: String,
    paths: Vec<Vec<String>>,
}

/// Adds a module and those below it, without tests.
fn collect(name: &[String], found: &mut Vec<Module>) {
    let folder = name.iter().fold(SOURCES.to_owned(), |folder, name| format!("{folder}/{name}"));
    let file = match name {
        [] => format!("{folder}/lib.rs"),
        _ => Some(format!("{folder}.rs"))
            .filter(|file| tree::root().join(file).is_file())
            .unwrap_or(format!("{folder}/mod.rs")),
    };
    let tokens = without_tests(tree::read(&file).parse().unwrap_or_else(|error| panic!("{file}: {error}")));
    let below = modules(tokens.clone());
    let mut used = BTreeSet::new();
    paths(tokens, "", &mut used);
    let paths = used.iter().filter_map(|path| absolute(path, name)).collect();
    found.push(Module { name: name.to_vec(), file, paths });
    for child in below {
        collect(&[name, &[child]].concat(), found);
    }
}

/// Returns the imports among modules of the same folder, by the names that lead to the folder. The
/// crate itself has no name.
fn siblings(modules: &[Module]) -> BTreeMap<Vec<String>, Imports> {
    let names: BTreeSet<&[String]> = modules.iter().map(|module| module.name.as_slice()).collect();
    let mut folders: BTreeMap<Vec<String>, Imports> = BTreeMap::new();
    for Module { name, file, paths } in modules {
        for path in paths {
            let common = name.iter().zip(path).take_while(|(own, other)| own == other).count();
            let (Some(from), Some(to)) = (name.get(common), path.get(common)) else { continue };
            if names.contains(&path[..=common]) {
                let imports = folders.entry(name[..common].to_vec()).or_default();
                imports.entry((from.clone(), to.clone())).or_default().insert(file.clone());
            }
        }
    }
    folders
}

/// Returns the imports that are part of a cycle.
fn cyclic(imports: &Imports) -> Imports {
    let mut reached: BTreeSet<(&str, &str)> =
        imports.keys().map(|(from, to)| (from.as_str(), to.as_str())).collect();
    let modules: BTreeSet<&str> = reached.iter().flat_map(|(from, to)| [*from, *to]).collect();
    for by in &modules {
        for from in &modules {
            for to in &modules {
                if reached.contains(&(*from, *by)) && reached.contains(&(*by, *to)) {
                    reached.insert((*from, *to));
                }
            }
        }
    }
    let is_cyclic = |(from, to): &(String, String)| reached.contains(&(to.as_str(), from.as_str()));
    imports
        .iter()
        .filter(|(ends, _)| is_cyclic(ends))
        .map(|(ends, files)| (ends.clone(), files.clone()))
        .collect()
}

/// The imports among the modules of each folder of the crate. The crate itself has no name.
static IMPORTS: LazyLock<BTreeMap<Vec<String>, Imports>> = LazyLock::new(|| {
    let mut modules = Vec::new();
    collect(&[], &mut modules);
    siblings(&modules)
});

/// Returns the rules that import cycles break, each with the imports that are part of them.
fn cycles() -> BTreeMap<String, Imports> {
    let folders = IMPORTS.iter().filter(|(folder, _)| !folder.is_empty());
    let cyclic = folders.map(|(folder, imports)| (format!("{CYCLE} {}", folder.join("/")), cyclic(imports)));
    cyclic.filter(|(_, imports)| !imports.is_empty()).collect()
}

/// Returns the upward imports.
fn upward_imports() -> Imports {
    let order = order(&tree::read("ARCHITECTURE.md"));
    let mut imports = IMPORTS.get(&[][..]).cloned().unwrap_or_default();
    let position = |name: &String| order.iter().position(|module| module == name);
    imports.retain(|(from, to), _| position(from) > position(to));
    imports
}

fn rule((from, to): &(String, String)) -> String {
    format!("{KIND} {from} -> {to}")
}

pub(crate) fn broken() -> Broken {
    let upward_imports = upward_imports().into_iter().map(|(ends, files)| (rule(&ends), files.len()));
    upward_imports.chain(cycles().into_iter().map(|(rule, imports)| (rule, imports.len()))).collect()
}

#[test]
fn the_table_of_modules_has_each() {
    let listed = order(&tree::read("ARCHITECTURE.md"));
    let source = tree::read(&format!("{SOURCES}/lib.rs"));
    let modules = modules(without_tests(source.parse().unwrap()));
    assert_eq!(BTreeSet::from_iter(&listed), BTreeSet::from_iter(&modules), "the table in ARCHITECTURE.md");
    assert_eq!(listed.len(), modules.len(), "the table in ARCHITECTURE.md has a module twice");
}

#[test]
fn imports_go_downwards() {
    let upward_imports = upward_imports();
    exceptions::hold(KIND, &broken(), |broken| {
        let files =
            upward_imports.iter().filter(|(ends, _)| rule(ends) == broken).flat_map(|(_, files)| files);
        files
            .map(|file| format!("{file}: {broken} is an upward import by the table of ARCHITECTURE.md"))
            .collect()
    });
}

#[test]
fn modules_of_a_folder_have_no_import_cycles() {
    let cycles = cycles();
    exceptions::hold(CYCLE, &broken(), |broken| {
        let imports = cycles.get(broken).into_iter().flatten();
        let line = |((from, to), files): (&(String, String), &BTreeSet<String>)| {
            let files = Vec::from_iter(files.iter().map(String::as_str)).join(", ");
            format!("{broken}: {from} imports {to} in {files}")
        };
        imports.map(line).collect()
    });
}

#[test]
fn cycles_are_found_among_modules_of_the_same_folder() {
    let words = |text: &str| text.split("::").map(str::to_owned).collect::<Vec<_>>();
    let module = |name: &str, paths: &[&str]| Module {
        name: words(name),
        file: name.to_owned(),
        paths: paths.iter().map(|path| words(path)).collect(),
    };
    let modules = [
        module("a", &["a::b::Item", "c::Item"]),
        module("a::b", &["a::Item", "a::c::d::Item"]),
        module("a::c", &[]),
        module("a::c::d", &["a::e::Item"]),
        module("a::e", &["a::b::Item", "a::f::Item"]),
        module("a::f", &[]),
    ];
    let found = cyclic(&siblings(&modules)[&words("a")]);
    let ends = found.keys().map(|(from, to)| format!("{from} {to}"));
    assert_eq!(ends.collect::<Vec<_>>(), ["b c", "c e", "e b"]);
}

#[test]
fn paths_lead_to_modules_of_the_crate() {
    let within = ["node".to_owned(), "state".to_owned()];
    for (path, expected) in [
        ("crate::model::Model", Some("model::Model")),
        ("super::super::model::Model", Some("model::Model")),
        ("self::super::super::model", Some("model")),
        ("super::facts::model", Some("node::facts::model")),
        ("model::Model", None),
        ("std::model", None),
        ("crate", Some("")),
    ] {
        assert_eq!(absolute(path, &within).map(|words| words.join("::")).as_deref(), expected, "{path}");
    }
    let page = "| word |\n| `a` |\n\n| module | what |\n|---|---|\n| `b`, `c` | `d` |\n| `e` | |\n\n| `f` |";
    assert_eq!(order(page), ["b", "c", "e"]);
    assert_eq!(modules("pub mod a; mod b { mod c; } mod d;".parse().unwrap()), ["a", "d"]);
}
