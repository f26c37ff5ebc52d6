package pages_test

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// krewPlugin is what krew reads of a manifest.
type krewPlugin struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Spec struct {
		Version          string `json:"version"`
		Homepage         string `json:"homepage"`
		ShortDescription string `json:"shortDescription"`
		Description      string `json:"description"`
		Caveats          string `json:"caveats"`
		Platforms        []struct {
			Selector struct {
				MatchLabels map[string]string `json:"matchLabels"`
			} `json:"selector"`
			URI    string `json:"uri"`
			SHA256 string `json:"sha256"`
			Bin    string `json:"bin"`
		} `json:"platforms"`
	} `json:"spec"`
}

// krewVersion is a version as krew accepts it: a semantic one, with a v.
var krewVersion = regexp.MustCompile(`^v(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?$`)

// `make krew` runs with a compiler that only writes down the platform that it compiles for: building
// the plugin four times would take minutes, and what is tested is what is around it.
func TestKrewInstallsWhatIsReleased(t *testing.T) {
	for version, published := range map[string]string{"v1.2.3": "v1.2.3", "devel": "v0.0.0-devel"} {
		t.Run(version, func(t *testing.T) {
			bin := makeKrew(t, version)
			text, err := os.ReadFile(filepath.Join(bin, "krew", "capi.yaml"))
			require.NoError(t, err)
			var plugin krewPlugin
			require.NoError(t, yaml.UnmarshalStrict(text, &plugin))

			require.Equal(t, "krew.googlecontainertools.github.com/v1alpha2", plugin.APIVersion)
			require.Equal(t, "Plugin", plugin.Kind)
			require.Equal(t, "capi", plugin.Metadata.Name, "the manifest's file has its name")
			require.Equal(t, published, plugin.Spec.Version)
			require.Regexp(t, krewVersion, plugin.Spec.Version)
			require.NotEmpty(t, plugin.Spec.ShortDescription)
			require.NotContains(t, plugin.Spec.ShortDescription, "\n")
			require.NotEmpty(t, plugin.Spec.Description)

			platforms := map[string]string{} // the archive of each
			for _, platform := range plugin.Spec.Platforms {
				labels := platform.Selector.MatchLabels
				require.ElementsMatch(t, []string{"os", "arch"}, slices.Collect(maps.Keys(labels)))
				name := labels["os"] + "-" + labels["arch"]
				require.NotContains(t, platforms, name, "only one is installed")
				address, archive, found := strings.Cut(platform.URI, "/releases/download/"+published+"/")
				require.True(t, found, platform.URI)
				require.Equal(t, plugin.Spec.Homepage, address)
				require.Equal(t, "kubectl-capi-"+name+".tar.gz", archive)
				platforms[name] = archive

				content, err := os.ReadFile(filepath.Join(bin, "krew", archive))
				require.NoError(t, err)
				sum := sha256.Sum256(content)
				require.Equal(t, hex.EncodeToString(sum[:]), platform.SHA256, archive)
				files := unpacked(t, filepath.Join(bin, "krew", archive))
				require.ElementsMatch(t, []string{"LICENSE", platform.Bin}, slices.Collect(maps.Keys(files)))
				require.Equal(t, name+"\n", files[platform.Bin], "the platform of the binary in %s", archive)
			}
			require.Len(t, platforms, 4)
			archives, err := filepath.Glob(filepath.Join(bin, "krew", "*.tar.gz"))
			require.NoError(t, err)
			require.Len(t, archives, len(platforms), "every archive is in the manifest")

			// The addresses of the manifest are those of a release's files on GitHub.
			release, err := os.ReadFile(filepath.Join(root(t), "deploy/tools/release.mk"))
			require.NoError(t, err)
			copied := regexp.MustCompile(`cp \$\(BIN\)/krew/(\S+) \$\(RELEASE\)`).FindStringSubmatch(string(release))
			require.NotNil(t, copied, "a release has the archives")
			for _, archive := range platforms {
				matches, err := filepath.Match(copied[1], archive)
				require.NoError(t, err)
				require.True(t, matches, archive)
			}
			require.Contains(t, string(release), "gh release create '$(VERSION)'")
			require.Contains(t, string(release), "$$(find $(RELEASE) -maxdepth 1 -type f)")

			page, err := pages.Read(root(t), "docs/kubectl-plugin.md")
			require.NoError(t, err)
			for _, file := range regexp.MustCompile(`bin/(krew/[\w.-]+)`).FindAllStringSubmatch(page.Text, -1) {
				require.FileExists(t, filepath.Join(bin, file[1]), "%s names it", page.Path)
			}
		})
	}
}

// makeKrew runs `make krew`, and returns the folder that it writes to instead of bin.
func makeKrew(t *testing.T, version string) string {
	t.Helper()
	compiler := t.TempDir()
	script := `#!/bin/sh
[ "$1" = build ] || exit 0
while [ "$1" != -o ]; do shift; done
echo "$GOOS-$GOARCH" >"$2"
`
	require.NoError(t, os.WriteFile(filepath.Join(compiler, "go"), []byte(script), 0o755))
	bin := filepath.Join(t.TempDir(), "bin")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "make", "--directory="+root(t), "krew", "BIN="+bin, "VERSION="+version, "COMMIT=none")
	// Flags of a make that runs the tests are not for this one.
	cmd.Env = append(os.Environ(), "PATH="+compiler+":"+os.Getenv("PATH"), "MAKEFLAGS=", "MFLAGS=", "MAKELEVEL=")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return bin
}

// unpacked returns the files in an archive.
func unpacked(t *testing.T, archive string) map[string]string {
	t.Helper()
	file, err := os.Open(archive)
	require.NoError(t, err)
	defer func() { _ = file.Close() }()
	compressed, err := gzip.NewReader(file)
	require.NoError(t, err)
	files := map[string]string{}
	for reader := tar.NewReader(compressed); ; {
		header, err := reader.Next()
		if err == io.EOF { //nolint:errorlint // tar returns it as it is
			return files
		}
		require.NoError(t, err)
		content, err := io.ReadAll(reader)
		require.NoError(t, err)
		files[header.Name] = string(content)
	}
}
