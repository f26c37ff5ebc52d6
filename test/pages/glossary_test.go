package pages_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// word is one that the glossary rules out, with what is written instead.
type word struct {
	not, but string
	found    *regexp.Regexp
}

// Options, metrics, values and the API have generated pages, so the pages have their texts, too.
func TestTheGlossarysWordsAreUsed(t *testing.T) {
	glossary, err := pages.Read(root(t), "docs/glossary.md")
	require.NoError(t, err)
	words := ruledOut(glossary)
	require.Greater(t, len(words), 10, "words were found")

	var problems []string
	texts := 0
	look := func(where, text string) {
		texts++
		problems = append(problems, misused(words, where, text)...)
	}
	all, err := pages.All(root(t))
	require.NoError(t, err)
	for _, page := range all {
		look(page.Path, wording(page))
	}
	require.Greater(t, texts, 40, "pages were found")

	texts = 0
	for _, module := range []string{"agent", "shim", "pkg"} {
		walk(t, module, ".go", func(path string) {
			if !strings.HasSuffix(path, "_test.go") {
				for where, sentence := range sentences(t, path) {
					look(where, sentence)
				}
			}
		})
	}
	require.Greater(t, texts, 2000, "sentences were found in the code: comments, events, conditions, errors, flags")

	texts = 0
	for _, extension := range []string{".yaml", ".txt"} {
		walk(t, "deploy/charts", extension, func(path string) {
			if !strings.Contains(path, "crds/karpenter.sh_") && !strings.Contains(path, "crds/autoscaling.x-k8s.io_") { // Karpenter's own
				text, err := os.ReadFile(filepath.Join(root(t), path))
				require.NoError(t, err)
				look(path, string(text))
			}
		})
	}
	require.Greater(t, texts, 20, "the charts' texts were found")
	require.Empty(t, problems, strings.Join(problems, "\n"))
}

func TestAWordThatTheGlossaryRulesOutIsFound(t *testing.T) {
	words := ruledOut(pages.Page{Text: "# Glossary\n\n| term | meaning |\n|---|---|\n| x | y |\n\n## Words that are not used\n\n" +
		"| not | but |\n|---|---|\n| cooldown, cool-off | cool-down |\n| node claim | NodeClaim |\n"})
	require.Len(t, words, 3)
	for text, wrong := range map[string]bool{
		"A cooldown begins.": true, "Cooldowns": true, "the cool-off": true, "its Node claim": true, "its node claims": true, "Node claims": true,
		"a cool-down": false, "node\nclaim": true, "precooldown": false, "cooldown-period": false, "a NodeClaim": false, "COOLDOWN_SECONDS": false,
	} {
		found := misused(words, "text", text)
		require.Equal(t, wrong, len(found) > 0, "%q: %v", text, found)
	}
	code := pages.Page{Text: "`cooldown` and [a page](cooldown.md)\n```console\n$ cooldown\n```\n"}
	require.Empty(t, misused(words, "page", wording(code)), "code is not prose")
	require.NotEmpty(t, misused(words, "page", wording(pages.Page{Text: "```console\n$ true\n```\na cooldown\n"})))
}

// ruledOut reads the table of the section "Words that are not used".
func ruledOut(glossary pages.Page) []word {
	_, section, _ := strings.Cut(glossary.Text, "\n## Words that are not used\n")
	var words []word
	for line := range strings.SplitSeq(section, "\n") {
		cells := strings.Split(strings.Trim(line, "|"), "|")
		if len(cells) != 2 || strings.HasPrefix(cells[0], "---") || strings.TrimSpace(cells[0]) == "not" {
			continue
		}
		for not := range strings.SplitSeq(cells[0], ",") {
			not = strings.TrimSpace(not)
			first := string(unicode.ToUpper(rune(not[0])))
			pattern := "(?:" + regexp.QuoteMeta(not[:1]) + "|" + first + ")" + strings.ReplaceAll(regexp.QuoteMeta(not[1:]), " ", `\s+`)
			found := regexp.MustCompile(`(?:^|[^\w./-])` + pattern + `(?:s|es)?(?:[^\w/-].{0,30}|$)`)
			words = append(words, word{not: not, but: strings.TrimSpace(cells[1]), found: found})
		}
	}
	return words
}

func misused(words []word, where, text string) []string {
	var problems []string
	for _, w := range words {
		if first, _, _ := strings.Cut(w.not, " "); !strings.Contains(text, first[1:]) { // much cheaper
			continue
		}
		for _, found := range w.found.FindAllString(text, -1) {
			problems = append(problems, fmt.Sprintf("%s: %q: %s, not %s", where, found, w.but, w.not))
		}
	}
	return problems
}

// wording returns a page's text without code and the targets of links, and the glossary's without
// the words that it rules out.
func wording(page pages.Page) string {
	if page.Path == "docs/glossary.md" {
		page.Text, _, _ = strings.Cut(page.Text, "\n## Words that are not used\n")
	}
	return inlineLink.ReplaceAllString(inlineCode.ReplaceAllString(strings.Join(prose(page), "\n"), "``"), "]")
}

// sentences returns the comments of a file, and the strings with spaces in its code, by their place.
func sentences(t *testing.T, path string) map[string]string {
	t.Helper()
	positions := token.NewFileSet()
	file, err := parser.ParseFile(positions, filepath.Join(root(t), path), nil, parser.ParseComments)
	require.NoError(t, err)
	found := map[string]string{}
	place := func(n ast.Node) string {
		at := positions.Position(n.Pos())
		return fmt.Sprintf("%s:%d:%d", path, at.Line, at.Column)
	}
	for _, comment := range file.Comments {
		found[place(comment)] = strings.TrimPrefix(comment.Text(), "Package "+file.Name.Name)
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if literal, ok := n.(*ast.BasicLit); ok && literal.Kind == token.STRING {
			text, err := strconv.Unquote(literal.Value)
			require.NoError(t, err)
			if strings.Contains(text, " ") {
				found[place(literal)] = text
			}
		}
		return true
	})
	return found
}

func walk(t *testing.T, folder, extension string, visit func(path string)) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(root(t), folder), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != extension {
			return err
		}
		relative, err := filepath.Rel(root(t), path)
		visit(relative)
		return err
	})
	require.NoError(t, err)
}
