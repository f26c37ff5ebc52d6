package pages_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

func TestEveryLinkLeadsToAFileAndAHeading(t *testing.T) {
	all, headings := headed(t)
	links := 0
	for _, page := range all {
		for _, link := range linksOf(page) {
			links++
			path, anchor, _ := strings.Cut(link, "#")
			target := page.Path
			if path != "" {
				target = filepath.Join(filepath.Dir(page.Path), path)
			}
			_, err := os.Stat(filepath.Join(root(t), target))
			require.NoError(t, err, "%s links to %s", page.Path, link)
			if anchor != "" {
				require.Contains(t, headings[target], anchor, "%s links to %s", page.Path, link)
			}
		}
	}
	require.Greater(t, links, 20, "links were found")
}

// headed returns all pages, and the anchors of the headings of each by its path.
func headed(t *testing.T) ([]pages.Page, map[string][]string) {
	t.Helper()
	all, err := pages.All(root(t))
	require.NoError(t, err)
	headings := map[string][]string{}
	for _, page := range all {
		headings[page.Path] = anchors(page)
	}
	return all, headings
}

// A folder below docs has a page of its own that links to the others.
func TestTheReadmeLinksToEveryPage(t *testing.T) {
	all, err := pages.All(root(t))
	require.NoError(t, err)
	linked := map[string][]string{}
	for _, page := range all {
		for _, link := range linksOf(page) {
			path, _, _ := strings.Cut(link, "#")
			linked[page.Path] = append(linked[page.Path], filepath.Join(filepath.Dir(page.Path), path))
		}
	}
	for _, page := range all {
		from := "README.md"
		folder := filepath.Join(filepath.Dir(page.Path), "README.md")
		if filepath.Dir(page.Path) != "docs" && page.Path != folder && linked[folder] != nil {
			from = folder
		}
		if page.Path != "README.md" && !strings.HasPrefix(page.Path, ".github/ISSUE") && !strings.HasPrefix(page.Path, ".github/PULL") {
			require.Contains(t, linked[from], page.Path, from)
		}
	}
}

// A page that says what a test shows must name one that there is.
func TestEveryTestOfAPageExists(t *testing.T) {
	there := map[string]bool{}
	function := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	for _, module := range []string{"agent", "shim", "pkg", "test", "deploy"} {
		err := filepath.WalkDir(filepath.Join(root(t), module), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			for _, found := range function.FindAllStringSubmatch(string(text), -1) {
				there[found[1]] = true
			}
			return err
		})
		require.NoError(t, err)
	}
	all, err := pages.All(root(t))
	require.NoError(t, err)
	named := regexp.MustCompile("`(Test[A-Z]\\w+)`")
	count := 0
	for _, page := range all {
		for _, name := range named.FindAllStringSubmatch(page.Text, -1) {
			count++
			require.Contains(t, there, name[1], "%s names it", page.Path)
		}
	}
	require.Greater(t, count, 50, "tests were found")
}

// Every make target on a page must exist.
func TestEveryMakeTargetOfAPageExists(t *testing.T) {
	var makefiles []byte
	for _, file := range []string{"Makefile", "deploy/tools/release.mk"} {
		content, err := os.ReadFile(filepath.Join(root(t), file))
		require.NoError(t, err)
		makefiles = append(makefiles, content...)
	}
	all, err := pages.All(root(t))
	require.NoError(t, err)
	targets := 0
	for _, page := range all {
		for _, match := range makeTarget.FindAllStringSubmatch(page.Text, -1) {
			for target := range strings.FieldsSeq(match[1]) {
				targets++
				if strings.HasPrefix(target, "bin/") {
					continue // one for each command and tool
				}
				require.Regexp(t, fmt.Sprintf(`(?m)^([a-z -]+ )?%s( [a-z -]+)?:`, regexp.QuoteMeta(target)), string(makefiles), "%s: make %s", page.Path, target)
			}
		}
	}
	require.Greater(t, targets, 10, "targets were found")
}

var (
	// In code only: after a prompt, or in backquotes.
	makeTarget = regexp.MustCompile("(?m)(?:^ *\\$ |`)(?:[A-Z]+=\\S+ )?make ((?:[a-z0-9/-]+ ?)+)")
	inlineLink = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	inlineCode = regexp.MustCompile("`[^`]*`")
	notInSlugs = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
)

// linksOf returns the page's links into the repository.
func linksOf(page pages.Page) []string {
	var found []string
	for _, line := range prose(page) {
		for _, match := range inlineLink.FindAllStringSubmatch(inlineCode.ReplaceAllString(line, ""), -1) {
			if !strings.Contains(match[1], "://") {
				found = append(found, match[1])
			}
		}
	}
	return found
}

// anchors returns the anchors that GitHub generates for the page's headings.
func anchors(page pages.Page) []string {
	var found []string
	for _, line := range prose(page) {
		if heading := strings.TrimLeft(line, "#"); strings.HasPrefix(heading, " ") && heading != line {
			slug := strings.ReplaceAll(notInSlugs.ReplaceAllString(strings.ToLower(strings.TrimSpace(heading)), ""), " ", "-")
			if again := strings.Count(fmt.Sprintf("%q", found), fmt.Sprintf("%q", slug)); again > 0 {
				slug = fmt.Sprintf("%s-%d", slug, again)
			}
			found = append(found, slug)
		}
	}
	return found
}

// prose returns the page's lines outside of code.
func prose(page pages.Page) []string {
	var lines []string
	code := false
	for line := range strings.SplitSeq(page.Text, "\n") {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			code = !code
		} else if !code {
			lines = append(lines, line)
		}
	}
	return lines
}

// Code, charts and error texts refer to pages by their path.
func TestEveryPageThatCodeCitesExists(t *testing.T) {
	_, headings := headed(t)
	cited := regexp.MustCompile(`\b(docs/[a-z0-9/-]+\.md)(?:#([a-z0-9-]+))?`)
	count := 0
	for _, folder := range []string{"agent", "deploy", "pkg", "proto", "shim"} {
		err := filepath.WalkDir(filepath.Join(root(t), folder), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !slices.Contains([]string{".go", ".md", ".mk", ".proto", ".tpl", ".txt", ".yaml"}, filepath.Ext(path)) {
				return err
			}
			text, err := os.ReadFile(path)
			for _, found := range cited.FindAllStringSubmatch(string(text), -1) {
				count++
				require.Contains(t, headings, found[1], "%s cites it", path)
				if found[2] != "" {
					require.Contains(t, headings[found[1]], found[2], "%s cites it", path)
				}
			}
			return err
		})
		require.NoError(t, err)
	}
	require.Greater(t, count, 50, "citations were found")
}

func TestEveryMetricOfAPageExists(t *testing.T) {
	reference, err := pages.Read(root(t), "docs/metrics.md")
	require.NoError(t, err)
	var there []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z_]+)`").FindAllStringSubmatch(reference.Text, -1) {
		there = append(there, row[1], row[1]+"_bucket", row[1]+"_sum", row[1]+"_count")
	}
	named := regexp.MustCompile(`\b(?:capi_agent|karpenter_capi|certwatcher|controller_runtime|grpc_client|grpc_server|rest_client|workqueue)_[a-z_]+`)
	all, err := pages.All(root(t))
	require.NoError(t, err)
	count := 0
	for _, page := range all {
		for _, name := range named.FindAllString(page.Text, -1) {
			count++
			require.Contains(t, there, name, page.Path)
		}
	}
	require.Greater(t, count, 100, "metrics were found")
}
