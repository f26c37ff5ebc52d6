// Package kubeconfig connects to the spoke with a kubeconfig file that may be replaced at any time:
// with a new client certificate or token, as control planes renew them, or with another server or
// authority. Every request uses the content that was read last.
//
// The file may come from a secret that others than the operator of this process can write.
// Therefore it accepts only credentials that the file itself contains. It rejects anything that
// runs a program, reads another file such as this pod's token, or skips the verification of the
// server.
package kubeconfig

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

const (
	// refresh is how often the file is read.
	refresh = 5 * time.Second
	// dialTimeout and keepAlive are client-go's values.
	dialTimeout = 30 * time.Second
	keepAlive   = 30 * time.Second
)

// File is a kubeconfig file. It is safe for concurrent use.
type File struct {
	path  string
	clock clock.WithTicker
	first *url.URL // the server when the file was opened, for which requests are built

	present atomic.Pointer[access]

	// The fields below belong to the goroutine of [File.Follow].

	content []byte
	failed  string // the last logged reason why the file could not be used
}

// access is the connection to the spoke by one version of the file.
type access struct {
	server    *url.URL
	base      *http.Transport
	transport http.RoundTripper // base, with the caller's credentials
}

// Open reads the file, which must be valid.
func Open(path string, clk clock.WithTicker) (*File, error) {
	f := &File{path: filepath.Clean(path), clock: clk}
	content, err := os.ReadFile(f.path)
	if err != nil {
		return nil, err
	}
	a, err := read(content)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.path, err)
	}
	f.content, f.first = content, a.server
	f.present.Store(a)
	return f, nil
}

// Config returns a configuration whose requests always use the file's current content.
func (f *File) Config() *rest.Config {
	return &rest.Config{Host: f.first.String(), Transport: f}
}

// RoundTrip sends a request with the content that was read last.
func (f *File) RoundTrip(request *http.Request) (*http.Response, error) {
	a := f.present.Load()
	if *a.server != *f.first {
		request = request.Clone(request.Context())
		request.URL.Scheme, request.URL.Host, request.Host = a.server.Scheme, a.server.Host, ""
		request.URL.Path = strings.TrimSuffix(a.server.Path, "/") + strings.TrimPrefix(request.URL.Path, strings.TrimSuffix(f.first.Path, "/"))
	}
	return a.transport.RoundTrip(request)
}

// Follow re-reads the file until ctx is done. While the file is invalid, the last valid content
// stays in use.
func (f *File) Follow(ctx context.Context) {
	ticker := f.clock.NewTicker(refresh)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
			f.reload(ctx)
		}
	}
}

func (f *File) reload(ctx context.Context) {
	logger := log.FromContext(ctx).WithName("kubeconfig").WithValues("file", f.path)
	content, err := os.ReadFile(f.path)
	if err == nil && bytes.Equal(content, f.content) {
		f.failed = ""
		return
	}
	var next *access
	if err == nil {
		next, err = read(content)
	}
	if err != nil {
		if f.failed != err.Error() {
			f.failed = err.Error()
			logger.Error(err, "the spoke's kubeconfig cannot be used; the previous one stays in use")
		}
		return
	}
	before := f.present.Swap(next)
	f.content, f.failed = content, ""
	// Requests and watches in progress continue on the old connection.
	before.base.CloseIdleConnections()
	logger.Info("the spoke's kubeconfig was replaced", "server", next.server.String())
}

// read returns the connection that a kubeconfig describes. An error contains nothing from it but
// names and the server.
func read(content []byte) (*access, error) {
	parsed, err := clientcmd.Load(content)
	if err != nil {
		return nil, errors.New("the content is not a kubeconfig")
	}
	for name, user := range parsed.AuthInfos {
		if err := refuseUser(user); err != nil {
			return nil, fmt.Errorf("user %q: %w", name, err)
		}
	}
	for name, cluster := range parsed.Clusters {
		if err := refuseCluster(cluster); err != nil {
			return nil, fmt.Errorf("cluster %q: %w", name, err)
		}
	}
	config, err := clientcmd.NewDefaultClientConfig(*parsed, &clientcmd.ConfigOverrides{}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("it cannot be used: %w", err)
	}
	server, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, fmt.Errorf("the server %q is not a URL; write https://host:port", config.Host)
	}
	return dial(server, config)
}

func refuseUser(user *clientcmdapi.AuthInfo) error {
	const remedy = "; write client-certificate-data and client-key-data, or token"
	switch {
	case user.Exec != nil:
		return errors.New("exec is not accepted, as it runs a program" + remedy)
	case user.AuthProvider != nil:
		return errors.New("auth-provider is not accepted, as it runs a program" + remedy)
	case user.TokenFile != "":
		return errors.New("tokenFile is not accepted, as it reads another file" + remedy)
	case user.ClientCertificate != "", user.ClientKey != "":
		return errors.New("client-certificate and client-key are not accepted, as they read other files" + remedy)
	}
	return nil
}

func refuseCluster(cluster *clientcmdapi.Cluster) error {
	switch {
	case cluster.InsecureSkipTLSVerify:
		return errors.New("insecure-skip-tls-verify is not accepted; write certificate-authority-data")
	case cluster.CertificateAuthority != "":
		return errors.New("certificate-authority is not accepted, as it reads another file; write certificate-authority-data")
	}
	return nil
}

// dial builds its own transport, because client-go caches transports forever.
func dial(server *url.URL, config *rest.Config) (*access, error) {
	tlsConfig, err := rest.TLSConfigFor(config)
	if err != nil {
		return nil, fmt.Errorf("certificates: %w", err)
	}
	proxy := http.ProxyFromEnvironment
	if config.Proxy != nil {
		proxy = config.Proxy
	}
	base := utilnet.SetTransportDefaults(&http.Transport{
		Proxy: proxy, TLSClientConfig: tlsConfig, TLSHandshakeTimeout: dialTimeout,
		DialContext: (&net.Dialer{Timeout: dialTimeout, KeepAlive: keepAlive}).DialContext,
	})
	transport, err := rest.HTTPWrappersForConfig(&rest.Config{
		BearerToken: config.BearerToken, Username: config.Username, Password: config.Password, Impersonate: config.Impersonate,
	}, base)
	if err != nil {
		return nil, fmt.Errorf("the caller's credentials: %w", err)
	}
	return &access{server: server, base: base, transport: transport}, nil
}
