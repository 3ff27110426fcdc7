//! The list of what does not keep the rules yet, `exceptions.txt`.

use std::{collections::BTreeMap, fs};

use crate::{layers, prose, sizes, tree};

const FILE: &str = "xtask/tests/rules/exceptions.txt";
const HEAD: &str = "\
# What does not keep the rules of the sources yet, as `rule: number`. The number may fall and must not rise, and a line
# is removed when nothing needs it any more. An import says after its number why it is there.
# A change that lowers numbers writes this file anew:
#     cargo test -p xtask --test rules -- --ignored write_exceptions
";

/// The number of times that each rule is broken. The key names the rule and what it is about.
pub(crate) type Broken = BTreeMap<String, usize>;

#[derive(Debug, Eq, PartialEq)]
struct Exception {
    number: usize,
    reason: String,
}

type Exceptions = BTreeMap<String, Exception>;

fn parse(text: &str) -> Exceptions {
    let entry = |line: &str| {
        let (rule, rest) = line.split_once(": ")?;
        let (number, reason) = rest.split_once("; ").unwrap_or((rest, ""));
        let exception = Exception { number: number.parse().ok()?, reason: reason.to_owned() };
        Some((rule.to_owned(), exception))
    };
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    lines.map(|line| entry(line).unwrap_or_else(|| panic!("{FILE}: no exception: {line}"))).collect()
}

/// Writes the list. Exceptions that stay keep their reasons.
fn write(broken: &Broken, former: &Exceptions) -> String {
    let line = |(rule, number): (&String, &usize)| match former.get(rule) {
        Some(Exception { reason, .. }) if !reason.is_empty() => format!("{rule}: {number}; {reason}\n"),
        _ => format!("{rule}: {number}\n"),
    };
    broken.iter().map(line).fold(HEAD.to_owned(), |text, line| text + &line)
}

/// Compares what breaks the rules of `kind` with the exceptions.
fn compare(kind: &str, broken: &Broken, exceptions: &Exceptions) -> Vec<String> {
    let of_kind = broken.iter().filter(|(rule, _)| rule.starts_with(kind));
    let raised = of_kind.filter_map(|(rule, number)| {
        let allowed = exceptions.get(rule).map_or(0, |exception| exception.number);
        (*number > allowed).then(|| format!("{rule}: {number}, and not more than {allowed} are allowed"))
    });
    let listed = exceptions.iter().filter(|(rule, _)| rule.starts_with(kind));
    let mistaken = listed.filter_map(|(rule, exception)| {
        if !broken.contains_key(rule) {
            Some(format!("{rule}: nothing needs this line of {FILE} any more"))
        } else if kind == layers::KIND && exception.reason.is_empty() {
            Some(format!("{rule}: {FILE} says no reason"))
        } else {
            None
        }
    });
    raised.chain(mistaken).collect()
}

/// Fails if more breaks the rules of a kind than is listed. `show` returns where a rule is
/// broken.
pub(crate) fn hold(kind: &str, broken: &Broken, show: impl Fn(&str) -> Vec<String>) {
    let wrong = compare(kind, broken, &parse(&tree::read(FILE)));
    for line in &wrong {
        let rule = line.split(": ").next().unwrap_or_default();
        show(rule).iter().for_each(|breach| println!("{breach}"));
        println!("{line}");
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
#[ignore = "writes the list of exceptions"]
fn write_exceptions() {
    let broken = [prose::broken(), layers::broken(), sizes::broken()].into_iter().flatten().collect();
    fs::write(tree::root().join(FILE), write(&broken, &parse(&tree::read(FILE)))).unwrap();
}

#[test]
fn the_list_can_only_become_shorter() {
    let exceptions = parse("# words\nfile a.rs: 700\nimport b -> c: 2; as it is\nimport c -> d: 1\n");
    let compare = |kind, broken: &[(&str, usize)]| {
        let broken = broken.iter().map(|(rule, number)| ((*rule).to_owned(), *number)).collect();
        compare(kind, &broken, &exceptions)
    };
    assert_eq!(compare("file", &[("file a.rs", 700)]), [""; 0]);
    assert_eq!(compare("file", &[("file a.rs", 650)]), [""; 0]);
    assert_eq!(compare("file", &[("file a.rs", 701)]).len(), 1);
    assert_eq!(compare("file", &[("file a.rs", 700), ("file b.rs", 601)]).len(), 1);
    assert_eq!(compare("file", &[]).len(), 1);
    let imports = [("import b -> c", 2), ("import c -> d", 1)];
    assert_eq!(
        compare("import", &imports),
        ["import c -> d: xtask/tests/rules/exceptions.txt says no reason"]
    );

    let broken = Broken::from([("file b.rs".to_owned(), 601), ("import b -> c".to_owned(), 1)]);
    let written = write(&broken, &exceptions);
    assert!(written.ends_with("file b.rs: 601\nimport b -> c: 1; as it is\n"), "{written}");
}
