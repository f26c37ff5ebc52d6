package pki

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
)

func TestWorkloadsAndServersOfOneAuthorityTrustEachOther(t *testing.T) {
	ca, err := NewCA("test")
	if err != nil {
		t.Fatal(err)
	}
	serving, err := ca.Server("server")
	if err != nil {
		t.Fatal(err)
	}
	workload, err := ca.Workload("spiffe://trust/cluster/fleet/spoke")
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca.PEM)

	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.TLS.PeerCertificates[0].URIs[0].String())
	}))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{keyPair(t, serving)}, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert}
	server.StartTLS()
	defer server.Close()

	for _, host := range []string{"127.0.0.1", "localhost"} {
		_, port, err := net.SplitHostPort(server.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{
			RootCAs: pool, Certificates: []tls.Certificate{keyPair(t, workload)},
		}}}
		response, err := client.Get("https://" + net.JoinHostPort(host, port))
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		_ = response.Body.Close()
		if got := string(body); got != "spiffe://trust/cluster/fleet/spoke" {
			t.Errorf("the server saw the identity %q", got)
		}
	}
}

func TestAnAuthorityIsReadFromItsPair(t *testing.T) {
	made, err := NewCA("agent")
	if err != nil {
		t.Fatal(err)
	}
	pair, err := made.Pair()
	if err != nil {
		t.Fatal(err)
	}
	read, err := ReadCA(pair)
	if err != nil {
		t.Fatal(err)
	}
	issued, err := read.Workload("spiffe://domain/cluster/fleet/spoke")
	if err != nil {
		t.Fatal(err)
	}
	leaf := keyPair(t, issued).Leaf
	if err := leaf.CheckSignatureFrom(made.certificate); err != nil {
		t.Error(err)
	}
	if _, err := ReadCA(Pair{Certificate: pair.Certificate}); err == nil {
		t.Error("an authority without a key")
	}
}

func TestAUserCarriesItsGroups(t *testing.T) {
	ca, err := NewCA("test")
	if err != nil {
		t.Fatal(err)
	}
	pair, err := ca.User("admin", "system:masters")
	if err != nil {
		t.Fatal(err)
	}
	subject := keyPair(t, pair).Leaf.Subject
	if subject.CommonName != "admin" || len(subject.Organization) != 1 || subject.Organization[0] != "system:masters" {
		t.Errorf("subject is %v", subject)
	}
}

func keyPair(t *testing.T, pair Pair) tls.Certificate {
	t.Helper()
	c, err := tls.X509KeyPair(pair.Certificate, pair.Key)
	if err != nil {
		t.Fatal(err)
	}
	return c
}
