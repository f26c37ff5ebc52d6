package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for name, tc := range map[string]struct {
		usage string
		want  []option
	}{
		"pflag": {
			"Usage of x:\n" +
				"      --listen-address host:port   Where to listen. (default \":8443\")\n" +
				"  -q, --quiet                      Say less.\n" +
				"  -h, --help                       Help.\n",
			[]option{
				{name: "listen-address", kind: "host:port", usage: "Where to listen.", standard: ":8443"},
				{name: "quiet", usage: "Say less."},
			},
		},
		"flag": {
			"Usage of x:\n" +
				"  -timeout duration\n    \tHow long. (default 10s)\n" +
				"  -quiet\n    \tSay\n    \tless.\n",
			[]option{
				{name: "quiet", usage: "Say less."},
				{name: "timeout", kind: "duration", usage: "How long.", standard: "10s"},
			},
		},
		"inherited": {
			"Flags:\n      --all   Everything.\n\nGlobal Flags:\n      --timeout duration   How long.\n",
			[]option{{name: "all", usage: "Everything."}},
		},
		"neither": {"panic: no\n", nil},
	} {
		t.Run(name, func(t *testing.T) {
			if got := parse(tc.usage); !slices.Equal(got, tc.want) {
				t.Errorf("got %+v, want %+v", got, tc.want)
			}
		})
	}
}

// fake is a program whose help is formatted as cobra's.
const fake = `#!/bin/sh
case "$*" in
--help) cat <<'END'
Does x.

Usage:
  fake [flags]
  fake [command]

Available Commands:
  completion  Generate
  help        Help
  keep        Keep things
  list        List

Flags:
      --all   Everything.

Use "fake [command] --help".
END
;;
'keep --help') cat <<'END'
Keeps things.

Usage:
  fake keep

Available Commands:
  one   Keep one
END
;;
'keep one --help') cat <<'END'
Keeps
one. By default:

  fake keep one X

Usage:
  fake keep one [flags] NAME

Flags:
      --for duration   How long. (default 1s)
  -h, --help           Help.

Global Flags:
      --all   Everything.
END
;;
'list --help') cat <<'END'
List

Usage:
  fake list A|B

Flags:
  -h, --help   Help.
END
;;
esac
`

func TestEveryCommandHasASection(t *testing.T) {
	dir := t.TempDir()
	binary, page := filepath.Join(dir, "fake"), filepath.Join(dir, "options.md")
	if err := os.WriteFile(binary, []byte(fake), 0o755); err != nil {
		t.Fatal(err)
	}
	for scope, row := range map[string]string{
		"":     "| flag | default | what it does |\n|---|---|---|\n| `--for` duration | `1s` | How long. |\n",
		":all": "| flag | environment variable | default | what it does |\n|---|---|---|---|\n| `--for` duration | `FAKE_FOR` | `1s` | How long. |\n",
	} {
		if err := run(page, []string{binary + ":FAKE_" + scope}); err != nil {
			t.Fatal(err)
		}
		content, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		_, got, _ := strings.Cut(string(content), "\n## ")
		want := "fake\n\n| flag | environment variable | default | what it does |\n|---|---|---|---|\n| `--all` | `FAKE_ALL` |  | Everything. |\n" +
			"\n### fake keep one\n\n`fake keep one [flags] NAME`\n\nKeeps one.\n\n" + row +
			"\n### fake list\n\n`fake list A|B`\n\nList.\n"
		if got != want {
			t.Errorf("with %q:\n%s\nwant:\n%s", scope, got, want)
		}
	}
}

func TestACommandWithoutUsageIsAnError(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "fake")
	script := "#!/bin/sh\n[ \"$*\" != --help ] || printf 'x\\n\\nAvailable Commands:\\n  one   One\\n\\nFlags:\\n      --all   Everything.\\n'\n"
	if err := os.WriteFile(binary, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	err := run(filepath.Join(t.TempDir(), "options.md"), []string{binary + ":FAKE_"})
	if err == nil || !strings.Contains(err.Error(), "fake one --help has no usage") {
		t.Errorf("got %v", err)
	}
}
