//! The rules of comments and documents: each sentence has a subject and a verb, and can be
//! understood without the line above it.
//!
//! What is found is something to look at, not a verdict. So a number of each kind is allowed, and
//! that number can only fall. This command lists only what is in lines that were added since a
//! commit:
//!
//!     PROSE_SINCE=<commit> cargo test -p xtask --test rules comments -- --show-output

use std::{collections::BTreeSet, env, process::Command, sync::LazyLock};

use regex::Regex;

use crate::{
    exceptions::{self, Broken},
    tree::{self, File},
};

const KIND: &str = "prose";
/// The most columns of a line with a comment.
const CODE_COLUMNS: usize = 100;
/// The most columns of a line of a document.
const PAGE_COLUMNS: usize = 120;
/// The most words of a sentence of a document.
const WORDS: usize = 30;
/// Files whose words are not ours, or are those of their time.
const SKIPPED: [&str; 4] = ["LICENSE", "NOTICE", "CHANGELOG", "conformance.md"];

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Rule {
    Fragment,
    Question,
    Inverted,
    Long,
    Sentence,
}

impl Rule {
    fn name(self) -> &'static str {
        match self {
            Self::Fragment => "prose fragment",
            Self::Question => "prose question",
            Self::Inverted => "prose inverted",
            Self::Long => "prose long",
            Self::Sentence => "prose sentence",
        }
    }

    fn says(self) -> &'static str {
        match self {
            Self::Fragment => "the comment begins with a sentence without subject",
            Self::Question => "the comment asks instead of saying",
            Self::Inverted => "the sentence begins with its object or participle",
            Self::Long => "the line is longer than 100 columns in Rust, or 120 in a document",
            Self::Sentence => "the sentence has more than 30 words",
        }
    }
}

/// A line or sentence that breaks a rule.
#[derive(Debug, Eq, PartialEq)]
struct Breach {
    rule: Rule,
    line: usize,
    text: String,
}

static FRAGMENT: LazyLock<Regex> = LazyLock::new(|| {
    regex(
        r"^(Of|As|By|Those|That|With|Without|Where|Whose|Which|From|For|To|At|In|On|Not|None|Only|So|Else|What|
        Whether|How|Than|Until|While|And|Or|But|Also|The\ssame|Its|Their|Both|Neither)\b",
    )
});
/// Matches sentences that begin with some of these words and have a verb.
static WITH_VERB: LazyLock<Regex> = LazyLock::new(|| {
    regex(
        r"^(To|From|For|In|On|At|With|Without|Where|While|Until|Not|Only|Both|Neither|Their|Its|The\ssame)\b.*\s
        (is|are|was|were|has|have|does|do|must|may|can|cannot|will|would|goes|comes|uses|returns|takes|needs|holds|
        gets|keeps)\b",
    )
});
static INVERTED: LazyLock<Regex> = LazyLock::new(|| {
    regex(
        r"(^|[.:;]\s)(Not\s\w+\s(is|are)|(Found|Left|Added|Kept|Told|Seen|Named|Written|Read)\s(is|are|by|of)|
        Of\s(these|those|what|whom)|(Nor|Neither)\s(is|are|does|do))\b",
    )
});
static COMMENT: LazyLock<Regex> = LazyLock::new(|| regex(r"^\s*//[/!]?\s?(?<text>.*)$"));
static ITEM: LazyLock<Regex> = LazyLock::new(|| regex(r"^\s*([-*]|\d+\.|\(\d+\))\s"));

/// Returns an expression that is written with spaces and line breaks between its parts.
fn regex(text: &str) -> Regex {
    Regex::new(&format!("(?x){text}")).unwrap()
}

fn in_code(source: &str) -> Vec<Breach> {
    let mut found = Vec::new();
    let mut is_first = true;
    for (line, whole) in (1..).zip(source.lines()) {
        let Some(comment) = COMMENT.captures(whole) else {
            is_first = true;
            continue;
        };
        let text = comment["text"].trim_end();
        let is_fragment = FRAGMENT.is_match(text) && !WITH_VERB.is_match(text);
        let broken = [
            (Rule::Fragment, is_first && is_fragment),
            (Rule::Question, is_first && text.ends_with('?')),
            (Rule::Inverted, INVERTED.is_match(text)),
            (Rule::Long, whole.chars().count() > CODE_COLUMNS),
        ];
        let broken = broken.into_iter().filter(|(_, is_broken)| *is_broken);
        found.extend(broken.map(|(rule, _)| Breach { rule, line, text: text.to_owned() }));
        is_first = false;
    }
    found
}

fn in_page(page: &str) -> Vec<Breach> {
    let mut found = Vec::new();
    let (mut paragraph, mut start) = (String::new(), 0);
    let mut is_code = false;
    // The last line ends the last paragraph.
    for (line, text) in (1..).zip(page.lines().chain([""])) {
        let is_fence = text.trim_start().starts_with("```");
        is_code ^= is_fence;
        let is_prose = !is_code && !is_fence && !text.starts_with("    ") && !text.starts_with(['|', '#']);
        if !is_prose || text.trim().is_empty() || ITEM.is_match(text) {
            let long = long_sentences(&std::mem::take(&mut paragraph));
            found.extend(long.into_iter().map(|text| Breach { rule: Rule::Sentence, line: start, text }));
        }
        if !is_prose || text.trim().is_empty() {
            continue;
        }
        if text.chars().count() > PAGE_COLUMNS && !text.contains("](") {
            found.push(Breach { rule: Rule::Long, line, text: text.to_owned() });
        }
        if INVERTED.is_match(text) {
            found.push(Breach { rule: Rule::Inverted, line, text: text.to_owned() });
        }
        if paragraph.is_empty() {
            start = line;
        }
        paragraph.push_str(text);
        paragraph.push('\n');
    }
    found
}

fn long_sentences(paragraph: &str) -> Vec<String> {
    let words: Vec<&str> = paragraph.split_whitespace().collect();
    let sentences = words.split_inclusive(|word| word.ends_with(['.', ':', ';']));
    sentences.filter(|words| words.len() > WORDS).map(|words| words.join(" ")).collect()
}

/// Returns what breaks a rule in the whole tree, each with the path of its file.
fn breaches() -> Vec<(String, Breach)> {
    let is_ours = |file: &File| {
        let name = file.path.rsplit('/').next().unwrap_or_default();
        !SKIPPED.iter().any(|skipped| name.starts_with(skipped))
    };
    let files = tree::files("", &[".rs", ".md"]).into_iter().filter(is_ours);
    let in_file = |File { path, text }: File| {
        let found = if path.ends_with(".rs") { in_code(&text) } else { in_page(&text) };
        found.into_iter().map(move |breach| (path.clone(), breach))
    };
    files.flat_map(in_file).collect()
}

pub(crate) fn broken() -> Broken {
    let mut broken = Broken::new();
    for (_, breach) in breaches() {
        *broken.entry(breach.rule.name().to_owned()).or_default() += 1;
    }
    broken
}

/// Returns the files and numbers of lines that were added since a commit.
fn added_since(commit: &str) -> BTreeSet<(String, usize)> {
    let mut git = Command::new("git");
    let output = git.args(["diff", "-U0", commit, "--"]).current_dir(tree::root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (mut file, mut line) = (String::new(), 0);
    let mut added = BTreeSet::new();
    for text in String::from_utf8_lossy(&output.stdout).lines() {
        if let Some(path) = text.strip_prefix("+++ b/") {
            path.clone_into(&mut file);
        } else if let Some((_, lines)) = text.strip_prefix("@@ ").and_then(|text| text.split_once('+')) {
            line = lines.split([',', ' ']).next().and_then(|line| line.parse().ok()).unwrap();
        } else if text.starts_with('+') {
            added.insert((file.clone(), line));
            line += 1;
        }
    }
    added
}

#[test]
fn comments_and_documents_are_sentences() {
    let breaches = breaches();
    let show = |(path, Breach { rule, line, text }): &(String, Breach)| {
        format!("{path}:{line}: {}: {text}", rule.says())
    };
    let since = env::var("PROSE_SINCE").ok();
    if let Some(commit) = &since {
        let added = added_since(commit);
        let is_new = |(path, breach): &&(String, Breach)| added.contains(&(path.clone(), breach.line));
        breaches.iter().filter(is_new).for_each(|breach| println!("{}", show(breach)));
    }
    exceptions::hold(KIND, &broken(), |name| {
        let of_rule = breaches.iter().filter(|(_, breach)| breach.rule.name() == name && since.is_none());
        of_rule.map(show).collect()
    });
}

#[test]
fn code_is_read_by_its_comments() {
    for (source, expected) in [
        ("/// Of the packet's client.\nfn a() {}", &[(Rule::Fragment, 1)][..]),
        ("fn a() {}\n    // As the next one.", &[(Rule::Fragment, 2)]),
        ("//! The same for both.", &[(Rule::Fragment, 1)]),
        ("/// In the kernel it is a number.", &[]),
        ("/// Offsets of fields.", &[]),
        ("/// Returns the port.\n/// Of the node.", &[]),
        ("/// Does it end?", &[(Rule::Question, 1)]),
        ("/// Returns it. Found is what ended.", &[(Rule::Inverted, 1)]),
        ("let a = \"// Of\"; // Of this.", &[]),
    ] {
        let found: Vec<_> = in_code(source).into_iter().map(|breach| (breach.rule, breach.line)).collect();
        assert_eq!(found, expected, "{source}");
    }
    let long = |columns| in_code(&format!("/// {}", "é".repeat(columns - 4))).len();
    assert_eq!([long(CODE_COLUMNS), long(CODE_COLUMNS + 1)], [0, 1]);
}

#[test]
fn pages_are_read_by_paragraphs() {
    let half = "word ".repeat(WORDS / 2);
    let whole = format!("{half}\n{half}");
    for (page, expected) in [
        (whole.clone(), &[][..]),
        (format!("\n{whole}more."), &[(Rule::Sentence, 2)]),
        (format!("{}: more.", whole.trim_end()), &[]),
        (format!("{half}\n\n{half}more"), &[]),
        (format!("- {half}\n- {half}"), &[]),
        (format!("```\n{whole}more\n```"), &[]),
        (format!("    {half}{half}more"), &[]),
        ("w".repeat(PAGE_COLUMNS + 1), &[(Rule::Long, 1)]),
        (format!("[a](b){}", "w".repeat(PAGE_COLUMNS)), &[]),
        (format!("| {} |", "w".repeat(PAGE_COLUMNS)), &[]),
        ("Words.\nNot found are those that end.".to_owned(), &[(Rule::Inverted, 2)]),
    ] {
        let found: Vec<_> = in_page(&page).into_iter().map(|breach| (breach.rule, breach.line)).collect();
        assert_eq!(found, expected, "{page}");
    }
}
