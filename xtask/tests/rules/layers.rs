//! The imports among the modules of proxy-ctl. They go downwards in the table of modules in
//! ARCHITECTURE.md, so that there are no import cycles.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};

use crate::{
    exceptions::{self, Broken},
    paths::{paths, without_tests},
    tree,
};

pub(crate) const KIND: &str = "import";
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

/// Returns the module of the crate that `path` leads to if it stands in the module `within`. A path
/// that leads above the crate in a module written inside of its parent is taken from the crate.
fn top<'a>(path: &'a str, within: &[String]) -> Option<&'a str> {
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
    if depth == 0 { words.next() } else { None }
}

/// Follows a module and those below it, without tests.
fn collect(module: &[String], imports: &mut Imports, tops: &[String]) {
    let folder = module.iter().fold(SOURCES.to_owned(), |folder, name| format!("{folder}/{name}"));
    let file = match module {
        [] => format!("{folder}/lib.rs"),
        _ => Some(format!("{folder}.rs"))
            .filter(|file| tree::root().join(file).is_file())
            .unwrap_or(format!("{folder}/mod.rs")),
    };
    let tokens = without_tests(tree::read(&file).parse().unwrap_or_else(|error| panic!("{file}: {error}")));
    let below = modules(tokens.clone());
    if let [from, ..] = module {
        let mut used = BTreeSet::new();
        paths(tokens, "", &mut used);
        let tops = used
            .iter()
            .filter_map(|path| top(path, module))
            .filter(|to| to != from && tops.iter().any(|top| top == to));
        for to in tops {
            imports.entry((from.clone(), to.to_owned())).or_default().insert(file.clone());
        }
    }
    for name in below {
        collect(&[module, &[name]].concat(), imports, tops);
    }
}

/// Returns the imports that go upwards.
fn upward() -> Imports {
    let order = order(&tree::read("ARCHITECTURE.md"));
    let mut imports = Imports::new();
    collect(&[], &mut imports, &order);
    let place = |name: &String| order.iter().position(|module| module == name);
    imports.retain(|(from, to), _| place(from) > place(to));
    imports
}

fn rule((from, to): &(String, String)) -> String {
    format!("{KIND} {from} -> {to}")
}

pub(crate) fn broken() -> Broken {
    upward().iter().map(|(ends, files)| (rule(ends), files.len())).collect()
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
    let upward = upward();
    exceptions::hold(KIND, &broken(), |broken| {
        let files = upward.iter().filter(|(ends, _)| rule(ends) == broken).flat_map(|(_, files)| files);
        files.map(|file| format!("{file}: {broken} goes upwards in the table of ARCHITECTURE.md")).collect()
    });
}

#[test]
fn paths_lead_to_modules_of_the_crate() {
    let within = ["node".to_owned(), "state".to_owned()];
    for (path, expected) in [
        ("crate::model::Model", Some("model")),
        ("super::super::model::Model", Some("model")),
        ("self::super::super::model", Some("model")),
        ("super::facts::model", None),
        ("model::Model", None),
        ("std::model", None),
        ("crate", None),
    ] {
        assert_eq!(top(path, &within), expected, "{path}");
    }
    let page = "| word |\n| `a` |\n\n| module | what |\n|---|---|\n| `b`, `c` | `d` |\n| `e` | |\n\n| `f` |";
    assert_eq!(order(page), ["b", "c", "e"]);
    assert_eq!(modules("pub mod a; mod b { mod c; } mod d;".parse().unwrap()), ["a", "d"]);
}
