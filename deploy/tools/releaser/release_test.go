package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"debug/elf"
	"encoding/base64"
	"encoding/binary"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// What is pushed to a registry is what was built, and a chart from there refers to the image there
// by its digest.
func TestAReleaseIsInstalledFromARegistry(t *testing.T) {
	root := chdirRoot(t)
	helm := filepath.Join(root, "bin", "helm")
	address := localRegistry(t)
	out := t.TempDir()
	layouts := filepath.Join(out, "images")
	identity := []string{"--version", "v0.2.0", "--commit", "abc", "--created", "1700000000", "--registry", address}
	made := func(command string, arguments ...string) error {
		return run(t.Context(), append(append([]string{command}, identity...), arguments...))
	}
	images := func(content string) {
		t.Helper()
		must(t, made("images", "--binaries", binaries(t, content), "--out", layouts))
	}
	push := func() error {
		return made("push", "--layouts", layouts, "--charts", out, "--helm", helm, "--insecure")
	}
	images("a binary")
	must(t, made("charts", "--layouts", layouts, "--helm", helm, "--out", out))
	must(t, push())

	tag, err := name.NewTag(address+"/capi-agent:v0.2.0", name.Insecure)
	must(t, err)
	index, err := remote.Index(tag)
	must(t, err)
	must(t, validate.Index(index))
	digest, err := index.Digest()
	must(t, err)
	manifest, err := index.IndexManifest()
	must(t, err)
	if got, want := manifest.Annotations["org.opencontainers.image.version"], "v0.2.0"; got != want {
		t.Errorf("the index has the version %q, want %q", got, want)
	}
	for i, platform := range []string{"linux/amd64", "linux/arm64"} {
		if got := manifest.Manifests[i].Platform.String(); got != platform {
			t.Errorf("image %d is for %s, want %s", i, got, platform)
		}
	}

	template := exec.CommandContext(t.Context(), helm, "template", "a", "oci://"+address+"/charts/capi-agent", "--version", "0.2.0", "--plain-http")
	rendered, err := template.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, rendered)
	}
	for _, want := range []string{"image: " + address + "/capi-agent@" + digest.String(), "helm.sh/chart: capi-agent-0.2.0", `app.kubernetes.io/version: "v0.2.0"`} {
		if !strings.Contains(strings.ReplaceAll(string(rendered), "version: v0.2.0", `version: "v0.2.0"`), want) {
			t.Errorf("the chart from the registry does not contain %s", want)
		}
	}

	must(t, push()) // what is there already is no error
	images("another binary")
	if err := push(); err == nil || !strings.Contains(err.Error(), "is there already") {
		t.Errorf("a release was replaced by another one: %v", err)
	}
	identity[1] = "v0.3.0"
	if err := push(); err == nil || !strings.Contains(err.Error(), "instead of "+address+"/capi-agent:v0.3.0") {
		t.Errorf("a build was pushed as another release: %v", err)
	}
}

// localRegistry serves a registry to clients without credentials, and returns where images are in it.
func localRegistry(t *testing.T) string {
	t.Helper()
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)
	home := t.TempDir()
	for _, variable := range []string{"HOME", "DOCKER_CONFIG", "HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"} {
		t.Setenv(variable, home)
	}
	return strings.TrimPrefix(server.URL, "http://") + "/product"
}

// smallRelease builds a release, and returns the registry's address and a function that pushes it
// there with a key.
func smallRelease(t *testing.T) (address string, push func(key string)) {
	t.Helper()
	root := chdirRoot(t)
	helm := filepath.Join(root, "bin", "helm")
	address = localRegistry(t)
	out := t.TempDir()
	layouts := filepath.Join(out, "images")
	identity := []string{"--version", "v0.2.0", "--registry", address}
	made := func(command string, arguments ...string) {
		t.Helper()
		must(t, run(t.Context(), append(append([]string{command}, identity...), arguments...)))
	}
	made("images", "--binaries", binaries(t, "a"), "--out", layouts)
	made("charts", "--layouts", layouts, "--helm", helm, "--out", out)
	return address, func(key string) {
		t.Helper()
		t.Setenv("RELEASE_KEY", key)
		made("push", "--layouts", layouts, "--helm", helm, "--charts", out, "--insecure")
	}
}

// What is pushed is signed in the way that cosign and policies of clusters verify, by each key once.
func TestWhatIsPushedIsSigned(t *testing.T) {
	address, push := smallRelease(t)
	signatures := func(repository string) (name.Digest, []v1.Descriptor) {
		t.Helper()
		tag, err := name.NewTag(address+repository, name.Insecure)
		must(t, err)
		pushed, err := remote.Head(tag)
		must(t, err)
		image, err := remote.Image(tag.Context().Tag("sha256-" + pushed.Digest.Hex + ".sig"))
		if isNotFound(err) {
			return tag.Digest(pushed.Digest.String()), nil
		}
		must(t, err)
		must(t, validate.Image(image, validate.Fast))
		manifest, err := image.Manifest()
		must(t, err)
		return tag.Digest(pushed.Digest.String()), manifest.Layers
	}
	images := []string{"/capi-agent:v0.2.0", "/karpenter-capi:v0.2.0"}
	push("")
	for _, repository := range images {
		if _, layers := signatures(repository); layers != nil {
			t.Errorf("%s is signed without a key", repository)
		}
	}
	first, firstKey := newKey(t)
	second, secondKey := newKey(t)
	push(firstKey)
	push(firstKey)
	push(secondKey)
	keys := []*ecdsa.PrivateKey{first, second}
	for _, repository := range append(images, "/charts/capi-agent:0.2.0", "/charts/karpenter:0.2.0") {
		pushed, layers := signatures(repository)
		if len(layers) != len(keys) {
			t.Fatalf("%s has %d signatures, want %d: one of each key", repository, len(layers), len(keys))
		}
		for i, layer := range layers {
			blob, err := remote.Layer(pushed.Context().Digest(layer.Digest.String()))
			must(t, err)
			reader, err := blob.Compressed()
			must(t, err)
			content, err := io.ReadAll(reader)
			must(t, err)
			want := fmt.Sprintf(`{"critical":{"identity":{"docker-reference":%q},"image":{"docker-manifest-digest":%q},`+
				`"type":"cosign container image signature"},"optional":null}`, pushed.Context().Name(), pushed.DigestStr())
			if string(content) != want || layer.MediaType != "application/vnd.dev.cosign.simplesigning.v1+json" {
				t.Errorf("%s: %s of the type %s is signed, want %s", repository, content, layer.MediaType, want)
			}
			signature, err := base64.StdEncoding.DecodeString(layer.Annotations["dev.cosignproject.cosign/signature"])
			must(t, err)
			if sum := sha256.Sum256(content); !ecdsa.VerifyASN1(&keys[i].PublicKey, sum[:], signature) {
				t.Errorf("%s: signature %d is invalid", repository, i)
			}
		}
	}
}

// cosign verifies the signatures of a release's key, and of no other, as docs/releases.md says.
func TestCosignVerifiesWhatIsPushed(t *testing.T) {
	cosign := os.Getenv("COSIGN")
	if cosign == "" {
		t.Skip("needs COSIGN=<binary of cosign>")
	}
	page, err := os.ReadFile("../../../docs/releases.md")
	must(t, err)
	commands := regexp.MustCompile(`(?m)^\$ cosign (verify .*) registry\.example\.com/(\S+):(v?)0\.1\.0$`).FindAllStringSubmatch(string(page), -1)
	if len(commands) != 2 {
		t.Fatalf("docs/releases.md has %d commands of cosign for what is in a registry, want 2", len(commands))
	}
	address, push := smallRelease(t)
	_, pemOfFirst := newKey(t)
	_, pemOfSecond := newKey(t)
	push(pemOfFirst)
	t.Chdir(t.TempDir())
	verify := func(key string) (failed []string) {
		t.Helper()
		openssl := exec.CommandContext(t.Context(), "openssl", "ec", "-pubout", "-out", "release-key.pub")
		openssl.Stdin = strings.NewReader(key)
		if output, err := openssl.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, output)
		}
		for _, c := range commands {
			arguments := append(strings.Fields(c[1]), "--allow-http-registry", address+"/"+c[2]+":"+c[3]+"0.2.0")
			output, err := exec.CommandContext(t.Context(), cosign, arguments...).CombinedOutput()
			t.Logf("cosign %s: %v: %s", strings.Join(arguments, " "), err, output)
			if err != nil {
				failed = append(failed, c[2])
			}
		}
		return failed
	}
	if failed := verify(pemOfFirst); failed != nil {
		t.Errorf("cosign does not verify %v", failed)
	}
	if failed := verify(pemOfSecond); len(failed) != 2 {
		t.Errorf("cosign does not refuse another key, except for %v", failed)
	}
}

// newKey returns a key, and its form in PEM.
func newKey(t *testing.T) (*ecdsa.PrivateKey, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	der, err := x509.MarshalECPrivateKey(key)
	must(t, err)
	return key, string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}))
}

// The same binaries result in the same image, wherever and whenever it is built.
func TestImagesAreReproducible(t *testing.T) {
	d := definition{Name: "capi-agent", Commands: []string{"capi-agent"}}
	r := release{Version: "v0.1.0", Created: time.Unix(1700000000, 0).UTC()}
	digests := map[v1.Hash]bool{}
	for _, content := range []string{"a", "a", "b"} {
		index, err := d.build(r, binaries(t, content), []string{"linux/amd64"})
		must(t, err)
		digest, err := index.Digest()
		must(t, err)
		digests[digest] = true
	}
	if len(digests) != 2 {
		t.Errorf("two different images have %d digests", len(digests))
	}
}

func TestAuthoritiesAreCertificates(t *testing.T) {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(authorities()) {
		t.Fatal("they contain no certificate")
	}
	if strings.Count(string(authorities()), "BEGIN CERTIFICATE") < 100 {
		t.Error("fewer than 100 authorities: Mozilla trusts more")
	}
}

func TestSetScalar(t *testing.T) {
	const document = "# Comment.\nimage:\n  # -- Digest.\n  digest: \"\" # none\n  repository: a\n  tag: 'b'\nother: {digest: c}\n"
	for _, c := range []struct {
		path       string
		want, fail string
	}{
		{path: "image.digest", want: strings.Replace(document, `""`, `"new"`, 1)},
		{path: "image.repository", want: strings.Replace(document, "repository: a", `repository: "new"`, 1)},
		{path: "image.tag", want: strings.Replace(document, "'b'", `"new"`, 1)},
		{path: "other.digest", want: strings.Replace(document, "{digest: c}", `{digest: "new"}`, 1)},
		{path: "image.other", fail: "there is no field image.other"},
		{path: "image.a", fail: "there is no field image.a"}, // a value, not a key
		{path: "image", fail: "image is not a scalar on one line"},
	} {
		got, err := setScalar([]byte(document), "new", strings.Split(c.path, ".")...)
		if c.fail != "" {
			if err == nil || err.Error() != c.fail {
				t.Errorf("%s: error %v, want %s", c.path, err, c.fail)
			}
			continue
		}
		if must(t, err); string(got) != c.want {
			t.Errorf("%s: got %s, want %s", c.path, got, c.want)
		}
	}
}

func TestAChangelogHasTheCommitsSinceTheLastTag(t *testing.T) {
	repository := t.TempDir()
	git := func(arguments ...string) {
		t.Helper()
		command := exec.CommandContext(t.Context(), "git", append([]string{"-C", repository, "-c", "user.name=a", "-c", "user.email=a@example.com"}, arguments...)...)
		if output, err := command.CombinedOutput(); err != nil {
			t.Fatalf("git %s: %v: %s", arguments[0], err, output)
		}
	}
	commit := func(subject string, files ...string) {
		t.Helper()
		for _, file := range files {
			must(t, os.MkdirAll(filepath.Dir(filepath.Join(repository, file)), 0o755))
			must(t, os.WriteFile(filepath.Join(repository, file), []byte(subject), 0o644))
		}
		git("add", ".")
		git("commit", "-qm", subject+"\n\nA body.")
	}
	write := func() string {
		t.Helper()
		file := filepath.Join(t.TempDir(), "CHANGELOG.md")
		must(t, run(t.Context(), []string{"changelog", "--version", "v0.2.0", "--created", "1700000000", "--repository", repository, "--out", file}))
		content, err := os.ReadFile(file)
		must(t, err)
		return string(content)
	}
	git("init", "-q")
	commit("Begin", "README.md")
	git("tag", "v0.2.0")
	if got := write(); !strings.Contains(got, "changes since the beginning.\n\n## Documentation and examples\n\n- Begin (") {
		t.Errorf("the first release has the changelog %s", got)
	}
	git("tag", "-d", "v0.2.0")
	git("tag", "v0.1.0")
	commit("Add a call", "agent/a.go", "proto/a.proto")
	commit("Fix the agent", "agent/b.go")
	commit("Test the agent", "agent/b_test.go")
	git("tag", "v0.2.0")
	lines := strings.Split(write(), "\n")
	for i, want := range []string{
		"# v0.2.0", "", "14 November 2023, changes since v0.1.0.", "",
		"## API and packages for other programs", "", "- Add a call (", "",
		"## Agent", "", "- Fix the agent (", "",
		"## Tests, sandbox and build", "", "- Test the agent (", "",
	} {
		if i >= len(lines) || !strings.HasPrefix(lines[i], want) {
			t.Fatalf("line %d is not %q in\n%s", i+1, want, strings.Join(lines, "\n"))
		}
	}
}

// The signature is ECDSA over the SHA-256 of the checksums, as openssl and cosign verify it, and
// sha256sum accepts the checksums.
func TestChecksumsAreSigned(t *testing.T) {
	key, written := newKey(t)
	file := filepath.Join(t.TempDir(), "key.pem")
	must(t, os.WriteFile(file, append([]byte("-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n"), written...), 0o600))

	dir := t.TempDir()
	definitions := filepath.Join(t.TempDir(), "images.yaml")
	must(t, os.WriteFile(definitions, []byte("- {name: a, commands: [capi-agent]}\n"), 0o644))
	arguments := []string{"--version", "v0.1.0", "--registry", "example.com", "--images", definitions}
	layouts := filepath.Join(dir, "images")
	must(t, run(t.Context(), append([]string{"images", "--binaries", binaries(t, "a"), "--out", layouts}, arguments...)))
	must(t, os.WriteFile(filepath.Join(dir, "chart.tgz"), []byte("a chart"), 0o644))
	for name, value := range map[string]string{"a file": file, "the key": written} {
		t.Setenv("RELEASE_KEY", value)
		must(t, run(t.Context(), append([]string{"checksums", "--dir", dir, "--layouts", layouts}, arguments...)))
		sums, err := os.ReadFile(filepath.Join(dir, checksumsFile))
		must(t, err)
		encoded, err := os.ReadFile(filepath.Join(dir, signatureFile))
		must(t, err)
		signature, err := base64.StdEncoding.DecodeString(strings.TrimSpace(string(encoded)))
		must(t, err)
		if sum := sha256.Sum256(sums); !ecdsa.VerifyASN1(&key.PublicKey, sum[:], signature) {
			t.Errorf("%s: the signature is invalid", name)
		}
		if lines := strings.Split(strings.TrimSpace(string(sums)), "\n"); len(lines) != 2 ||
			!strings.HasSuffix(lines[0], "  chart.tgz") || !strings.HasSuffix(lines[1], "  images.txt") {
			t.Errorf("%s: the checksums are of other files: %s", name, sums)
		}
		check := exec.CommandContext(t.Context(), "sha256sum", "--check", "--strict", checksumsFile)
		check.Dir = dir
		if output, err := check.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", name, err, output)
		}
	}
	t.Setenv("RELEASE_KEY", "")
	must(t, run(t.Context(), append([]string{"checksums", "--dir", dir, "--layouts", layouts}, arguments...)))
	if _, err := os.Stat(filepath.Join(dir, signatureFile)); !os.IsNotExist(err) {
		t.Errorf("a release without a key has a signature: %v", err)
	}
	t.Setenv("RELEASE_KEY", "-----BEGIN PUBLIC KEY-----\n")
	if err := run(t.Context(), append([]string{"checksums", "--dir", dir, "--layouts", layouts}, arguments...)); err == nil {
		t.Error("a release with a key that cannot be used was not refused")
	}
}

// The commands of docs/releases.md make a key with which the releaser signs, and verify its
// signature.
func TestAReleaseIsVerifiedAsThePageSays(t *testing.T) {
	if _, err := exec.LookPath("openssl"); err != nil {
		t.Skip("openssl is not installed")
	}
	root := chdirRoot(t)
	page, err := os.ReadFile(filepath.Join(root, "docs", "releases.md"))
	must(t, err)
	_, section, _ := strings.Cut(string(page), "## Signing and verifying\n")
	section, _, found := strings.Cut(section, "\n## ")
	blocks := regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(section, -1)
	if !found || len(blocks) != 2 {
		t.Fatalf("docs/releases.md has %d blocks of commands about signatures, want 2", len(blocks))
	}
	dir := t.TempDir()
	execute := func(block int) ([]byte, error) {
		bash := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", blocks[block][1])
		bash.Dir = dir
		return bash.CombinedOutput()
	}
	if output, err := execute(0); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	layouts := filepath.Join(dir, "images")
	identity := []string{"--version", "v0.1.0", "--registry", "example.com"}
	must(t, run(t.Context(), append([]string{"images", "--binaries", binaries(t, "a"), "--out", layouts}, identity...)))
	for _, file := range []string{"release-key.pem", "release-key.pub"} { // the release does not contain them
		content, err := os.ReadFile(filepath.Join(dir, file))
		must(t, err)
		must(t, os.Remove(filepath.Join(dir, file)))
		if file == "release-key.pem" {
			t.Setenv("RELEASE_KEY", string(content))
			continue
		}
		must(t, run(t.Context(), append([]string{"checksums", "--dir", dir, "--layouts", layouts}, identity...)))
		must(t, os.WriteFile(filepath.Join(dir, file), content, 0o644))
	}
	output, err := execute(1)
	if err != nil || !strings.Contains(string(output), "Verified OK") {
		t.Fatalf("%v: %s", err, output)
	}
	must(t, os.WriteFile(filepath.Join(dir, imagesFile), []byte("example.com/capi-agent@sha256:0\n"), 0o644))
	if output, err := execute(1); err == nil {
		t.Errorf("an image of somebody else's is accepted: %s", output)
	}
	sums, err := os.ReadFile(filepath.Join(dir, checksumsFile))
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, checksumsFile), append(sums, "0  x\n"...), 0o644))
	if output, err := execute(1); err == nil || !strings.Contains(string(output), "erification") {
		t.Errorf("changed checksums are accepted: %v: %s", err, output)
	}
}

// An image has no libraries, and of each platform only its own programs.
func TestProgramsThatDoNotRunInTheImageAreRefused(t *testing.T) {
	d, r := definition{Name: "capi-agent", Commands: []string{"capi-agent"}}, release{Version: "v0.1.0"}
	dynamic := program(elf.EM_X86_64)
	binary.LittleEndian.PutUint16(dynamic[56:], 1) // one program header, right behind the file's
	dynamic = append(dynamic, make([]byte, 56)...)
	binary.LittleEndian.PutUint32(dynamic[64:], uint32(elf.PT_INTERP))
	for says, c := range map[string]struct {
		platform string
		content  []byte
	}{
		"":                    {"linux/amd64", program(elf.EM_X86_64)},
		"EM_AARCH64":          {"linux/amd64", program(elf.EM_AARCH64)},
		"EM_X86_64":           {"linux/arm64", program(elf.EM_X86_64)},
		"not linked static":   {"linux/amd64", dynamic},
		"not a program":       {"linux/amd64", []byte("#!/bin/sh\n")},
		"the platform linux/": {"linux/riscv64", program(elf.EM_X86_64)},
	} {
		dir := t.TempDir()
		folder := filepath.Join(dir, strings.ReplaceAll(c.platform, "/", "-"))
		must(t, os.Mkdir(folder, 0o755))
		must(t, os.WriteFile(filepath.Join(folder, "capi-agent"), c.content, 0o755))
		_, err := d.build(r, dir, []string{c.platform})
		if says == "" && err != nil || says != "" && (err == nil || !strings.Contains(err.Error(), says)) {
			t.Errorf("%s: %v instead of %q", c.platform, err, says)
		}
	}
}

// program returns the header of a program for a machine, and no more.
func program(machine elf.Machine) []byte {
	header := make([]byte, 64)
	copy(header, elf.ELFMAG)
	header[elf.EI_CLASS], header[elf.EI_DATA], header[elf.EI_VERSION] = byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)
	binary.LittleEndian.PutUint16(header[16:], uint16(elf.ET_EXEC))
	binary.LittleEndian.PutUint16(header[18:], uint16(machine))
	binary.LittleEndian.PutUint32(header[20:], uint32(elf.EV_CURRENT))
	binary.LittleEndian.PutUint64(header[32:], 64) // where the program headers are
	binary.LittleEndian.PutUint16(header[52:], 64)
	binary.LittleEndian.PutUint16(header[54:], 56)
	return header
}

// binaries returns a folder with a file in place of each binary of each platform.
func binaries(t *testing.T, content string) string {
	t.Helper()
	dir := t.TempDir()
	for platform, machine := range map[string]elf.Machine{"linux-amd64": elf.EM_X86_64, "linux-arm64": elf.EM_AARCH64} {
		must(t, os.Mkdir(filepath.Join(dir, platform), 0o755))
		for _, command := range []string{"capi-agent", "karpenter", "fake-agent", "capi-agent-conformance"} {
			must(t, os.WriteFile(filepath.Join(dir, platform, command), append(program(machine), content+command+platform...), 0o755))
		}
	}
	return dir
}

// chdirRoot makes the repository's root the working directory, in which make runs the releaser.
func chdirRoot(t *testing.T) string {
	t.Helper()
	root, err := filepath.Abs("../../..")
	must(t, err)
	t.Chdir(root)
	return root
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
