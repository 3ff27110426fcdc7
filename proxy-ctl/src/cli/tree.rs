//! The tree of all commands and flags, for help texts, completions and manual pages. The flags of
//! `run` come from the table from which they are parsed.

use std::{fs, io, path::Path};

use anyhow::Context as _;
use clap::{Command, CommandFactory as _};
use clap_complete::Shell;

use super::{args::Args, table};
use crate::config::{FLAGS, Flag, Group, Sets, ValueKind};

/// The flag that `config` and `probe` have in addition to those of `run`.
pub(super) static OUTPUT: [Flag; 1] = [Flag {
    name: "output",
    short: Some('o'),
    value: ValueKind::Text("FORMAT"),
    sets: Sets::Other,
    group: Group::Main,
    deprecated: None,
    help: "The format: a table for people, or another for programs [default: table].",
}];

const WIDTH: usize = 100;

fn proxy_ctl() -> Command {
    let with = |flags: Vec<&'static Flag>| move |command: Command| with_flags(command, flags);
    // `--bpffs` is a global flag already.
    let run: Vec<_> = FLAGS.iter().filter(|flag| flag.name != "bpffs").collect();
    let effective = run.iter().copied().filter(|flag| flag.sets != Sets::Nothing);
    let asking: Vec<_> = OUTPUT.iter().chain(effective).collect();
    let printed = |words: &'static [&'static str]| {
        move |command: Command| command.mut_arg("output", |output| output.value_parser(words.to_vec()))
    };
    Args::command()
        .mut_subcommand("run", with(run))
        .mut_subcommand("probe", with(asking.clone()))
        .mut_subcommand("probe", printed(&["table", "json"]))
        .mut_subcommand("config", with(asking))
        .mut_subcommand("config", printed(&["table", "json", "yaml"]))
}

pub(super) fn run() -> Command {
    subcommand("run")
}

pub(super) fn subcommand(name: &str) -> Command {
    let mut tree = proxy_ctl();
    // This copies global arguments into each subcommand.
    tree.build();
    tree.find_subcommand_mut(name).map(|command| command.clone()).unwrap_or(tree)
}

pub(super) fn kube_proxy() -> Command {
    let command = Command::new("kube-proxy")
        .about("proxy-ctl instead of kube-proxy: the service proxy of a Kubernetes node")
        .after_help("Called as proxy-ctl, the program has more commands: proxy-ctl --help.");
    with_flags(command.disable_help_flag(true).max_term_width(WIDTH), FLAGS.iter().collect())
}

/// Adds flags to a command, group by group.
fn with_flags(command: Command, flags: Vec<&'static Flag>) -> Command {
    let grouped =
        Group::ALL.into_iter().flat_map(|group| flags.iter().filter(move |flag| flag.group == group));
    let arguments = grouped.enumerate().map(|(position, flag)| flag.argument().display_order(position));
    command.args(arguments.collect::<Vec<_>>())
}

pub(super) fn help(mut command: Command) -> anyhow::Result<()> {
    Ok(table::print(&command.render_help().to_string())?)
}

pub(super) fn completion(shell: Shell) -> anyhow::Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut proxy_ctl(), "proxy-ctl", &mut text);
    let text = String::from_utf8(text)?;
    Ok(table::print(&if shell == Shell::Bash { with_one_label(&text) } else { text })?)
}

/// Gives each subcommand one label. clap_complete 4.6 writes `proxy__ctl__subcmd__status` where it
/// looks for the subcommand, and `proxy__subcmd__ctl__subcmd__status` where it completes it. There
/// it takes the hyphen of `proxy-ctl` for the border of a subcommand (clap #6421).
fn with_one_label(script: &str) -> String {
    script.replace("proxy__subcmd__ctl", "proxy__ctl")
}

pub(super) fn manual(folder: &Path) -> anyhow::Result<()> {
    let write = || -> io::Result<()> {
        fs::create_dir_all(folder)?;
        clap_mangen::generate_to(proxy_ctl(), folder)
    };
    write().with_context(|| format!("--directory {}: the pages cannot be written", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clap_accepts_the_trees() {
        proxy_ctl().debug_assert();
        kube_proxy().debug_assert();
    }

    fn subcommands() -> impl Iterator<Item = Command> {
        let mut tree = proxy_ctl();
        tree.build();
        let subcommands: Vec<_> =
            tree.get_subcommands().filter(|one| one.get_name() != "help").cloned().collect();
        std::iter::once(tree).chain(subcommands)
    }

    #[test]
    fn paragraphs_of_help_are_wrapped_once() {
        for command in subcommands() {
            let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            for (line, next) in lines.iter().zip(lines.iter().skip(1)) {
                let is_example = |line: &str| line.starts_with("  ");
                let is_heading = line.ends_with(':');
                assert!(
                    next.is_empty()
                        || line.is_empty()
                        || is_example(next) && (is_heading || is_example(line)),
                    "{}: a paragraph goes on in another line: {line:?}, {next:?}",
                    command.get_name()
                );
                assert!(
                    !is_example(line) || line.len() <= 80,
                    "the example is wrapped at 80 columns: {line:?}"
                );
            }
        }
    }

    #[rstest::rstest]
    fn help_fits_the_terminal(#[values(80, 100)] width: usize) {
        for command in subcommands() {
            let text = command.term_width(width).render_long_help().to_string();
            for line in text.lines() {
                assert!(line.chars().count() <= width, "{line:?}");
            }
        }
    }

    #[test]
    fn help_lists_every_flag() {
        let texts = [kube_proxy(), run()].map(|mut command| command.render_help().to_string());
        for flag in FLAGS {
            let long = format!("--{}", flag.name);
            assert!(texts.iter().all(|text| text.contains(&long)), "{long}");
        }
    }
}
